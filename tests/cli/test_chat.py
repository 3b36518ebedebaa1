"""Conversations with a tiny random model: the commands, the remarks on answers, and going on with what is stored."""

import contextlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from click.testing import Result
from hypothesis import given
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hybrid_cache import PrefixStore
from hf_hybrid_cache.chat import AnswerSettings, Chat
from hf_hybrid_cache.cli.chat_commands import COMMANDS
from hf_hybrid_cache.cli.console import without_controls

from .commands import SHORT, error_of, lines, run, without_heavy
from .terminals import CTRL_C, CTRL_D, ENTER, PROMPT, Terminal
from common.soak import search_at_random
from models.byte_tokenizer import model_in
from models.word_tokenizer import word_tokenizer

TEXT = "It was signed by Ada in London."


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "report.txt"
    path.write_text(TEXT)
    path.with_name("b c.txt").write_text("Bob was there.")
    return path


def converse(model: Path, source: Sequence[object], *typed: str) -> Result:
    options = ["--model", model, "--device", "cpu", "--max-new-tokens", 5, *source]
    return run("chat", *options, typed="".join(f"{line}\n" for line in typed))


# Commands


def set_to(**values: Any) -> Callable[[Chat], None]:
    return lambda chat: setattr(chat, "settings", replace(chat.settings, **values))


# What is typed, and what a conversation does then; an answer is printed.
TYPED: dict[str, Callable[[Chat], Any]] = {
    "Who?": lambda chat: chat.ask("Who?"),
    '"""\n/quit\nnow\n"""': lambda chat: chat.ask("/quit\nnow"),
    "/undo": lambda chat: chat.undo() and None,
    "/forget": lambda chat: chat.forget(),
    "/document 'b c.txt'": lambda chat: chat.attach(["b c.txt"]),
    "/document b c.txt": lambda chat: chat.attach(["b c.txt"]),
    "/system Be brief.": lambda chat: setattr(chat, "system", "Be brief."),
    "/set max_new_tokens 9": set_to(max_new_tokens=9),
    "/set stop e": set_to(stop=("e",)),
    "/set stop": set_to(stop=()),
    "/set top_k 5": set_to(top_k=5),
    "/set thinking no": set_to(thinking=False),
    '/set chat_template_kwargs {"reasoning_effort": "low"}': set_to(chat_template_kwargs={"reasoning_effort": "low"}),
    "/set repetition_penalty 1.1": set_to(repetition_penalty=1.1),
}
# What is typed in vain, and what is told.
IN_VAIN = {
    "/set temperature hot": "temperature must be a number, got 'hot'.",
    "/set thinking perhaps": "thinking must be yes or no, got 'perhaps'.",
    "/set chat_template_kwargs 1": "chat_template_kwargs must be JSON, got '1'.",
    "/set beams 4": "There is no setting 'beams': max_new_tokens, temperature, top_p,",
    "/document": "Say which document it is: /document FILE",
    "/document missing.txt": "Cannot read missing.txt: No such file",
    "/system": "Say what the message is: /system TEXT",
    f"/system {'brief ' * 12_000}": "context is 65,536: the message is not set",
    "/save file": "There is no /save.\n/stats ",
    "/help": "\n/set NAME VALUE ",
}


@search_at_random(6)
@given(
    lines=st.lists(st.sampled_from([*TYPED, *TYPED, *IN_VAIN]), max_size=9),
    end=st.sampled_from(["/quit", "/bye", "exit"]),
)
def test_any_conversation_prints_the_answers_of_the_engine(lines: list[str], end: str, model: Path, report: Path):
    with contextlib.chdir(report.parent):
        loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        settings = AnswerSettings(5, temperature=0.8, top_p=0.9, seed=3)
        chat, expected = Chat(loaded, tokenizer, [report], settings=settings, progress=False, bits=8), ""
        for line in lines:
            answer = TYPED.get(line, lambda _: None)(chat)
            expected += "" if answer is None else without_controls("".join(answer)) + "\n"
        options = ["--bits", "8", "--temperature", "0.8", "--top-p", "0.9", "--seed", "3"]
        talk = converse(model, ["--document", report, *options], *lines, end, "Never asked?")
        assert talk.stdout == expected
        assert [line for line in lines if IN_VAIN.get(line, "") not in talk.stderr] == []


def test_the_page_lists_what_can_be_typed_and_set():
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    rows = page.partition("| typed |")[2].partition("\n\n")[0]
    names = [*COMMANDS, *(field.name for field in fields(AnswerSettings))]
    assert [name for name in names if f"`{name}`" not in rows] == []


def test_what_is_taken_back_or_cannot_be_is_told(model: Path, report: Path):
    quoted, of_settings = '"""\n/quit\nnow\n"""', ("/set temperature 0.5", "/set temperature", "/set stop END")
    talk = converse(model, [], "/undo", "Who?", quoted, "/undo", "/undo", "/undo", "/forget", *of_settings)
    assert "taken back: /quit\nnow" in talk.stderr
    assert talk.stderr.count("taken back: Who?") == 1
    assert talk.stderr.count("Nothing was asked yet.") == 2
    assert "ended at --max-new-tokens 5: /set max_new_tokens 10 allows more" in talk.stderr
    assert re.search(r"back to \d+ tokens", talk.stderr)
    settings = "max_new_tokens 5, temperature 0.0, stop 'END', drafts 15, max_thinking_tokens 2048"
    assert talk.stderr.endswith(f"\n{settings}\n")
    source = ["--document", report, "--bits", "8", "--system", "Be brief.", "--stop", "e"]
    asked = ["generate", "--model", model, *SHORT, "--max-new-tokens", 5, "--question", "Who?"]
    assert run(*asked, *source).stdout == converse(model, source, "Who?").stdout


# Documents


def test_context_when_nearly_full_then_warns_once_until_more_is_left(report: Path, tmp_path: Path):
    talk = converse(
        model_in(tmp_path, 700), ["--document", report], "/set max_new_tokens 60", "Who?" * 30, "Why?", "/forget",
        "What?" * 30, "/set max_new_tokens 1000", "And?", "Why?" * 20,
    )  # fmt: skip
    assert len(re.findall(r"(\d+) tokens of context left", talk.stderr)) == 2
    assert "ended at the context of 700 tokens. /undo takes back the last question" in talk.stderr
    assert "context is 700: no room is left for an answer. /undo takes back the last question" in talk.stderr


def test_context_of_a_conversation_limits_documents_and_talk_together(model: Path, tmp_path: Path):
    (tmp_path / "long.txt").write_text(TEXT * 40)
    few = ["--context", "600", "--store", tmp_path / "prompts"]
    talk = converse(model, ["--document", tmp_path / "long.txt", *few], "/set max_new_tokens 1000", "Who?", "Why?")
    [left] = map(int, re.findall(r"the context is 600, of which (\d+) are left to ask and answer", talk.stdout))
    assert 0 < left < 600
    assert f"{left} tokens are left to talk" in talk.stderr
    assert "ended at the context of 600 tokens. /undo takes back the last question" in talk.stderr
    resumed = converse(model, ["--resume", *few], "Why?").stderr
    assert "600 of 600 tokens are taken" in resumed
    assert "context is 600: no room is left for an answer" in resumed
    alone = converse(model, ["--context", "90"], "/set max_new_tokens 1000", "Who?").stderr
    assert "ended at the context of 90 tokens" in alone


# Going on with what is stored


def test_a_conversation_goes_on_with_what_it_was_begun_with(model: Path, report: Path, tmp_path: Path):
    begun = ["--document", report, "--store", tmp_path, "--store-max", "1GiB", "--dtype", "bfloat16"]
    whole = converse(model, [*begun, "--bits", "8", "--weights", "8", "--system", "Be brief."], "Who?", "Where?").stdout
    resume = ["chat", "--device", "cpu", "--max-new-tokens", 5, "--store", tmp_path, "--resume"]
    talk = run(*resume, typed="/undo\nWhere?\n/stats\n")
    assert whole.endswith(talk.stdout)
    assert "going on with report.txt: Who?: " in talk.stderr
    again = converse(model, [*begun, "--bits", "8", "--weights", "8", "--system", "Be brief."])
    assert "\ndocument taken from the store in " in again.stderr
    assert f"last question: Where?\nlast answer: {talk.stdout.strip()}" in talk.stderr
    assert "of 8 bits" in talk.stderr
    run(*resume, typed="/forget\n")
    assert "has no conversation: begin one without --resume." in error_of(*resume)
    report.write_text(TEXT * 9)
    converse(model, begun)
    assert "'1' is a prompt, and no conversation" in error_of(*resume, 1)


def test_other_options_than_were_stored_are_refused_by_name(model: Path, tmp_path: Path):
    converse(model, ["--store", tmp_path, "--bits", "8"], "Who?")
    refused = {"--bits": "4", "--model": "other", "--weights": "8", "--cache": "dynamic", "--dtype": "float32"}
    begun = {"--bits": "with --bits 8", "--model": f"with --model {model}", "--cache": "with --cache quantized"}
    commands = (["chat", "--store", tmp_path, "--resume", name, value] for name, value in refused.items())
    for (name, value), ended in zip(refused.items(), without_heavy(*commands), strict=True):
        how = begun.get(name, f"without {name}")
        assert f"error: {name} {value}: Who? was begun {how}, and goes on so: drop {name}" in ended.stderr


def test_a_conversation_is_named_by_number_or_id(model: Path, report: Path, tmp_path: Path):
    for question in ("Who?", "Where?"):
        converse(model, ["--store", tmp_path, "--document", report], question)
    listed = PrefixStore(tmp_path).prompts()
    (first,) = (number for number, each in enumerate(listed, 1) if each.title.endswith("Who?"))
    resume = ["--store", tmp_path, "--resume"]
    for which in (str(first), listed[first - 1].id[:6]):
        assert "last question: Who?" in converse(model, [*resume, which]).stderr
    assert "last question: Who?" in converse(model, resume).stderr  # it was used last
    ids = {each["title"]: each["id"] for each in lines(run("store", tmp_path, "--json"))}
    converse(model, [*resume, ids["report.txt: Who?"]], "Why?")
    assert {each["title"]: each["id"] for each in lines(run("store", tmp_path, "--json"))} == ids
    assert "names none of 2" in error_of("chat", *resume, 9)


def test_a_conversation_with_a_name_goes_on_by_it_and_is_exported(model: Path, report: Path, tmp_path: Path):
    begun = ["--store", tmp_path, "--document", report]
    for name, question in (("tax", "Who?"), ("law", "Where?")):
        converse(model, [*begun, "--name", name, "--system", "Be brief."], question)
    talk = converse(model, ["--store", tmp_path, "--resume", "tax"], "Why?")
    assert "going on with tax: " in talk.stderr
    assert "last question: Who?" in talk.stderr
    (exported,) = lines(run("store", tmp_path, "--export", "tax", "--json"))
    asked = [each["content"] for each in exported["messages"]]
    assert (asked[0], asked[1::2], exported["name"]) == ("Be brief.", ["Who?", "Why?"], "tax")
    assert without_controls(asked[4]).strip() == talk.stdout.strip()
    shown = run("store", tmp_path, "--export", exported["id"][:6]).stdout
    assert re.match(r"# tax\n\n\*\*Who\?\*\*\n\n.*\n\n\*\*Why\?\*\*\n\n", shown, re.DOTALL)
    assert "has a conversation tax: go on with --resume tax" in error_of("chat", *begun, "--name", "tax")
    assert "'3' must have letters" in error_of("chat", *begun, "--name", 3)
    run("store", tmp_path, "--remove", "law")
    assert "'law' names none of" in error_of("store", tmp_path, "--export", "law")


@pytest.mark.filterwarnings("default:The prompt is read, and not kept")
def test_a_conversation_goes_on_when_the_disk_is_full(
    model: Path, report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_store = converse(model, ["--document", report], "Who?", "Where?")
    full = shutil.disk_usage(report)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    talk = converse(model, ["--document", report, "--store", tmp_path / "prompts"], "Who?", "Where?")
    assert talk.stdout == without_store.stdout
    assert talk.stderr.count(" not kept: ") == 1
    assert "Free some, or close" in talk.stderr
    monkeypatch.undo()
    given = ["--document", report, "--store", tmp_path / "small", "--store-max", "1KiB"]
    assert "Raise --store-max, " in converse(model, given, "Who?").stderr


# At a terminal


def test_ctrl_c_when_at_a_terminal_then_ends_only_the_answer(tmp_path: Path):
    # Every token is a word, which is shown at once.
    model = model_in(tmp_path, 2**16, word_tokenizer())
    (tmp_path / "report.txt").write_text("w1 w2 " * 50)
    store = ["--store", tmp_path / "store"]
    for question in ("w3", "w4"):
        converse(model, ["--document", tmp_path / "report.txt", *store], question)
    command = [
        "-m",
        "hf_hybrid_cache.cli",
        "chat",
        *store,
        "--resume",
        "2",
        "--device",
        "cpu",
        "--max-new-tokens",
        40_000,
    ]
    with Terminal(*command, HF_HYBRID_CACHE_HOME=str(tmp_path), OMP_NUM_THREADS="1") as terminal:
        terminal.type("/stats" + ENTER)  # while the model is loaded
        terminal.wait_for("last question: w3")
        terminal.wait_for("tokens are taken")
        for _ in range(2):
            terminal.wait_for(PROMPT)
            terminal.type(CTRL_C)
            terminal.wait_for("Ctrl-D or /quit ends the conversation")
        terminal.enter("w3")
        terminal.wait_for("\n")
        terminal.wait_for("w")
        terminal.type(CTRL_C)
        terminal.wait_for("the answer was ended")
        terminal.enter("/stats")
        terminal.wait_for("first token after ")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
