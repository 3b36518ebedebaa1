"""Options of `generate` for sampling an answer and for showing it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.cli.console import UsageError
from hf_hybrid_cache.cli.runs.sampling import GREEDY, Sampling

from models.byte_tokenizer import model_in

SHORT = ["--context-tokens", "60", "--max-new-tokens", "6"]
Invoke = Callable[..., Any]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a tiny model that answers in bytes."""
    return ["--model", str(model_in(tmp_path_factory.mktemp("model"), 2048)), "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def about(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a question about a short text."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("Ada signed the contract in the presence of two witnesses. " * 4)
    return ["--document", str(path), "--question", "Who signed?"]


def invoke(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def answered(on_cpu: list[str], about: list[str]) -> Callable[..., dict]:
    def of(*arguments: str) -> dict:
        """Run `generate --json` and return the answer."""
        result = invoke("generate", *on_cpu, *about, *SHORT, "--json", "--quiet", *arguments)
        assert result.exit_code == 0, result.stderr
        (line,) = result.stdout.splitlines()
        return json.loads(line)

    return of


def test_json_is_one_line_with_the_answer_that_is_printed_without_it(
    answered: Invoke, on_cpu: list[str], about: list[str]
):
    shown = answered()
    printed = invoke("generate", *on_cpu, *about, *SHORT)
    # A terminal is spared control characters, and is told before the answer that the document was cut.
    said, shown_there = ("".join(filter(str.isprintable, text)) for text in (shown["answer"], printed.stdout))
    assert said
    assert shown_there.endswith(said)
    assert shown["cache"] == "dynamic"
    assert shown["answer_tokens"] == 6
    assert shown["finish_reason"] == "length"
    assert shown["read_tokens"] == 60 < shown["document_tokens"]
    assert shown["prompt_tokens"] > 60
    assert "ended at --max-new-tokens 6, which may be raised\n" in printed.stderr


def test_quiet_writes_the_answer_alone(on_cpu: list[str], about: list[str]):
    result = invoke("generate", *on_cpu, *about, *SHORT, "--quiet")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.strip()


def test_a_comparison_as_json_has_a_line_for_every_row(on_cpu: list[str], about: list[str]):
    result = invoke("generate", *on_cpu, *about, *SHORT, "--compare", "--json", "--quiet", "--max-new-tokens", "2")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    names = ["stock", "dynamic", "offloaded", "quantized", "4-bit weights and quantized"]
    assert [row["cache"] for row in rows] == names
    assert len({row["answer"] for row in rows[:3]}) == 1


def test_a_seed_gives_the_same_sample_again_and_another_seed_another_one(answered: Invoke):
    hot = ["--temperature", "3", "--max-new-tokens", "12"]
    first, again, other = (answered(*hot, "--seed", seed)["answer"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_of_the_likeliest_tokens_alone_the_answer_is_the_likeliest(answered: Invoke):
    narrow = ["--temperature", "1", "--top-p", "0.0001", "--seed", "3"]
    assert answered(*narrow)["answer"] == answered()["answer"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, "--top-p is for sampling: pass --temperature"),
        ({"seed": 0}, "--seed is for sampling: pass --temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p must be above 0 and at most 1, got 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "at most 1, got 1.5"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty must be above 0, got 0.0"),
    ],
)
def test_an_option_that_would_be_ignored_or_is_out_of_range_is_refused(options: dict, message: str):
    with pytest.raises(UsageError, match=message):
        Sampling(**options)


def test_several_processes_sample_only_with_a_seed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="pass --seed"):
        Sampling(1.0)
    assert Sampling(1.0, seed=5).options()["do_sample"]


def test_sampling_when_no_option_is_given_then_is_greedy():
    chosen = GREEDY.options()
    assert not chosen["do_sample"]
    assert {chosen[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")} == {None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare", "--temperature", "1"], "--compare takes the likeliest token each time"),
        (["--json", "--save-cache", "kept.kv", "--document", __file__], "--json is of an answer: ask something"),
    ],
)
def test_options_when_contradictory_then_are_refused(options: list[str], message: str):
    result = invoke("generate", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_shell_can_complete_the_command():
    assert "--install-completion" in invoke("--help").stdout


def test_a_system_message_stands_before_the_document(answered: Invoke):
    plain, told = answered(), answered("--system", "Answer in capital letters, please, always.")
    assert plain["prompt_tokens"] < told["prompt_tokens"]
    assert told["read_tokens"] == plain["read_tokens"]


def test_answers_to_many_questions_are_sampled_as_one_is(tmp_path: Path, on_cpu: list[str]):
    (tmp_path / "a.txt").write_text("Ada signed the contract.")
    (tmp_path / "q.jsonl").write_text('{"document": "a.txt", "question": "Who signed?"}\n')
    hot = ["--temperature", "2", "--seed", "4", "--system", "Be brief.", "--max-new-tokens", "6"]
    answers = [
        json.loads(invoke("batch", tmp_path / "q.jsonl", "--out", "-", *hot, *on_cpu).stdout)["answer"]
        for _ in range(2)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("options", [["--prompt-file", __file__], ["--load-cache", "a.kv", "--question", "What?"]])
def test_a_system_message_is_refused_where_it_would_be_ignored(options: list[str]):
    result = invoke("generate", "--system", "Be brief.", *options)
    assert result.exit_code == 2
    assert "drop --system" in result.stderr
