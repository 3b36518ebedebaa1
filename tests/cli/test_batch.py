"""`hf-hybrid-cache batch`: every question is answered once, whatever happens in between."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_hybrid_cache import DynamicHybridCache, prefill
from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.cli.batch.answers import RESULT_FIELDS
from hf_hybrid_cache.cli.batch.at_once import QuestionsAtOnce
from hf_hybrid_cache.cli.batch.batch_options import BatchOptions
from hf_hybrid_cache.cli.batch.following_questions import FollowingQuestion, prompts_together
from hf_hybrid_cache.cli.batch.questions import Question
from hf_hybrid_cache.cli.model_options import ModelOptions
from hf_hybrid_cache.cli.runs import timed_run
from hf_hybrid_cache.cli.runs.answer_options import AnswerOptions
from hf_hybrid_cache.prefix_store import PrefixStore

from models.tiny_models import VOCAB_SIZE, random_prompt, tiny_model
from models.word_tokenizer import word_model_in

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="ends processes by signals")
NEW_TOKENS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a tokenizer for texts such as "w1 w2"."""
    return word_model_in(tmp_path_factory.mktemp("model"))


class Batch:
    """Documents, questions about them, and the command that answers these."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model = folder, model
        self.questions, self.out = folder / "questions.jsonl", folder / "answers.jsonl"

    def document(self, name: str, num_words: int, first: int = 1) -> str:
        words = (f"w{(first * 31 + 7 * index) % VOCAB_SIZE}" for index in range(num_words))
        (self.folder / name).write_text(" ".join(words))
        return name

    def ask(self, *questions: dict[str, Any]) -> None:
        self.questions.write_text("".join(json.dumps(question) + "\n" for question in questions))

    def command(self, *options: str | Path) -> list[str]:
        given = ["--model", self.model, "--device", "cpu", "--max-new-tokens", NEW_TOKENS, *options]
        return ["batch", str(self.questions), "--out", str(self.out), *map(str, given)]

    def run(self, *options: str | Path) -> Any:
        return CliRunner().invoke(app, self.command(*options))

    def start(self, *options: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "hf_hybrid_cache.cli", *self.command(*options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            # Where tests run in the background of a shell, interrupts would be ignored by inheritance.
            preexec_fn=None if sys.platform == "win32" else lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def by_question(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(answer["document"], answer["question"]): answer for answer in self.answers()}

    def texts(self) -> dict[tuple[str, str], str]:
        return {key: answer["answer"] for key, answer in self.by_question().items()}


@pytest.fixture
def batch(tmp_path: Path, model: Path) -> Batch:
    return Batch(tmp_path, model)


def two_documents(batch: Batch) -> None:
    long, short = batch.document("long.txt", 300), batch.document("short.txt", 20, first=5)
    batch.ask(
        {"document": long, "question": "w3 w1 w4"},
        {"document": short, "question": "w2 w7", "id": "b"},
        {"document": long, "question": "w9", "id": 7},
        {"document": long, "question": "w1 w5 w9 w2"},
    )


@pytest.mark.parametrize("options", [[], ["--bits", "8"], ["--cache", "offloaded"]])
def test_answers_are_those_of_a_question_asked_alone(batch: Batch, options: list[str], tmp_path: Path):
    two_documents(batch)
    result = batch.run(*options)
    assert result.exit_code == 0, result.stderr
    assert "4 of 4 questions are answered" in result.stderr
    answers = batch.answers()
    assert {(answer["question"], answer.get("id")) for answer in answers} == {
        ("w3 w1 w4", None),
        ("w2 w7", "b"),
        ("w9", 7),
        ("w1 w5 w9 w2", None),
    }
    for answer in answers:
        saved, document = tmp_path / "saved", tmp_path / answer["document"]
        common = ["generate", "--model", str(batch.model), "--device", "cpu", "--max-new-tokens", str(NEW_TOKENS)]
        kept = CliRunner().invoke(app, [*common, "--document", str(document), "--save-cache", str(saved), *options])
        alone = CliRunner().invoke(app, [*common, "--load-cache", str(saved), "--question", answer["question"]])
        assert kept.exit_code == alone.exit_code == 0, kept.stderr + alone.stderr
        assert answer["answer"] == alone.stdout.strip()
        assert (answer["answer_tokens"], answer["finish_reason"]) == (NEW_TOKENS, "length")
        assert answer["prompt_tokens"] > answer["read_tokens"] == answer["document_tokens"]
        assert answer["seconds"] > 0 < answer["document_seconds"]


def test_what_is_answered_is_not_asked_again_and_what_failed_is(batch: Batch):
    two_documents(batch)
    batch.ask(
        {"document": "long.txt", "question": "w3"},
        {"document": "none.txt", "question": "w3"},
        {"document": "short.txt", "question": "w4"},
    )
    first = batch.run()
    assert first.exit_code == 1
    assert f"{batch.questions}, line 2: none.txt: Cannot read" in first.stderr
    before = batch.by_question()
    assert [key for key, answer in before.items() if "error" in answer] == [("none.txt", "w3")]
    batch.document("none.txt", 30)
    second = batch.run()
    assert second.exit_code == 0
    assert "2 of 3 questions were answered before" in second.stderr
    after = batch.by_question()
    assert set(after) == set(before)
    assert "answer" in after.pop(("none.txt", "w3"))
    assert all(before[key] == answer for key, answer in after.items())
    written = batch.out.read_bytes()
    assert batch.run().exit_code == 0
    assert batch.out.read_bytes() == written


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Cannot read"),
        (b"\xff\x00\xfe", "is not UTF-8 text"),
        (b"w1\0w2", "is a binary file"),
        (b"  ", "is empty"),
        (b"w1 " * 600, "The document has 600 tokens, of which"),
    ],
    ids=["missing", "not text", "binary", "empty", "too long"],
)
def test_batch_when_a_document_fails_then_its_line_has_the_error(batch: Batch, content: bytes | None, message: str):
    if content is not None:
        (batch.folder / "bad.txt").write_bytes(content)
    good = batch.document("good.txt", 50)
    batch.ask(
        {"document": "bad.txt", "question": "w1"},
        {"document": good, "question": "w1"},
        {"document": "bad.txt", "question": "w2"},
    )
    result = batch.run()
    assert result.exit_code == 1
    answers = batch.by_question()
    assert message in answers["bad.txt", "w1"]["error"]
    assert answers["bad.txt", "w1"]["error"] == answers["bad.txt", "w2"]["error"]
    assert "answer" in answers[good, "w1"]


@pytest.mark.parametrize("options", [[], ["--context", "1000"]])
def test_a_question_that_does_not_fit_fails_alone(batch: Batch, options: list[str]):
    document = batch.document("long.txt", 600 if options else 100)
    batch.ask(
        {"document": document, "question": "w1", "id": 1},
        {"document": document, "question": "w1 " * 600, "id": 2},
        {"document": document, "question": "w1 w2 w3 " * 20, "id": 3},
    )
    assert batch.run(*options).exit_code == 1
    first, long, last = sorted(batch.answers(), key=lambda answer: answer["id"])
    assert "Ask a shorter question" in long["error"]
    assert "answer" in first
    assert "answer" in last


@pytest.mark.parametrize("options", [[], ["--bits", "8"]])
def test_a_question_for_which_memory_ends_fails_alone(
    batch: Batch, options: list[str], monkeypatch: pytest.MonkeyPatch
):
    two_documents(batch)
    assert batch.run(*options).exit_code == 0
    texts = batch.texts()
    batch.out.unlink()
    begun = []

    class Recorder(timed_run._Recorder):
        """A recorder whose memory ends with the second token of the second answer."""

        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) == 2:
                begun.append(self)
                if len(begun) == 2:
                    raise MemoryError("no room")

    monkeypatch.setattr(timed_run, "_Recorder", Recorder)
    assert batch.run(*options).exit_code == 1
    answers = batch.by_question()
    failed = [key for key, answer in answers.items() if "error" in answer]
    assert len(failed) == 1
    assert answers[failed[0]]["error"] == "no room"
    assert {key: answer["answer"] for key, answer in answers.items() if key not in failed} == {
        key: text for key, text in texts.items() if key not in failed
    }


# Several questions at once


LENGTHS = [1, 7, 2, 30, 70, 3]


def questions_of_different_lengths(batch: Batch) -> None:
    long, short = batch.document("long.txt", 300), batch.document("short.txt", 20, first=5)
    words = [
        " ".join(f"w{(5 + 3 * length + 11 * index) % VOCAB_SIZE}" for index in range(length)) for length in LENGTHS
    ]
    # Questions about the short document are between those about the long one.
    batch.ask(*({"document": document, "question": text, "topic": 1} for text in words for document in (long, short)))


@pytest.mark.parametrize(
    "options",
    [[], ["--cache", "offloaded"], ["--repetition-penalty", "1.5"], ["--prefill-chunk-size", "16"]],
    ids=" ".join,
)
def test_questions_at_once_get_the_answers_of_each_alone(batch: Batch, options: list[str]):
    questions_of_different_lengths(batch)
    assert batch.run(*options).exit_code == 0
    alone = batch.by_question()
    assert {answer["at_once"] for answer in alone.values()} == {1}
    assert len(set(batch.texts().values())) > len(LENGTHS)
    for at_once, sizes in [(4, {4, 2}), (100, {6})]:
        batch.out.unlink()
        result = batch.run("--at-once", at_once, *options)
        assert result.exit_code == 0, result.stderr
        together = batch.by_question()
        assert list(together) == list(alone)
        assert {answer["at_once"] for answer in together.values()} == sizes
        for name in ("answer", "finish_reason", "prompt_tokens", "answer_tokens", "topic", "settings"):
            assert [each[name] for each in together.values()] == [each[name] for each in alone.values()]


def test_answers_when_number_at_once_is_auto_then_are_those_alone(batch: Batch):
    questions_of_different_lengths(batch)
    assert batch.run().exit_code == 0
    alone = batch.by_question()
    batch.out.unlink()
    result = batch.run("--at-once", "auto")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("--at-once auto: at most 32 questions about a document together\n") == 1
    together = batch.by_question()
    assert {answer["at_once"] for answer in together.values()} == {len(LENGTHS)}
    for name in ("answer", "finish_reason", "settings"):
        assert [each[name] for each in together.values()] == [each[name] for each in alone.values()]


def test_number_at_once_when_auto_then_is_at_most_what_was_measured(batch: Batch):
    document = batch.document("short.txt", 20)
    batch.ask(*({"document": document, "question": f"w{number}"} for number in range(40)))
    assert batch.run("--at-once", "auto").exit_code == 0
    assert [answer["at_once"] for answer in batch.answers()] == 32 * [32] + 8 * [8]


def test_number_at_once_when_memory_is_short_then_is_lower_and_said(batch: Batch, monkeypatch: pytest.MonkeyPatch):
    questions_of_different_lengths(batch)
    monkeypatch.setattr("hf_hybrid_cache.planning.machine.available_host_bytes", lambda: 0)
    result = batch.run("--at-once", "auto")
    assert result.exit_code == 0, result.stderr
    for name in ("long.txt", "short.txt"):
        assert result.stderr.count(f"{name}: memory has room for 1 of 6 questions at once\n") == 1
    assert "--at-once auto: at most" not in result.stderr
    assert {answer["at_once"] for answer in batch.answers()} == {1}


def test_number_at_once_when_jobs_share_memory_then_fits_a_part(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("llama")
    cache = prefill(model, random_prompt(1, 200), DynamicHybridCache(model.config), progress=False)
    following = [FollowingQuestion(Question(1, {"document": "a", "question": "b"}), [7] * 20, 99) for _ in range(12)]
    options = BatchOptions(ModelOptions("tiny"), "dynamic", None, AnswerOptions(50), None, None, at_once=None)

    def numbers(num_jobs: int) -> list[int]:
        at_once = QuestionsAtOnce(model, options, num_jobs, Console(file=io.StringIO()))
        found = []
        for power in range(16, 26):
            monkeypatch.setattr("hf_hybrid_cache.planning.machine.available_host_bytes", lambda: 2**power)  # noqa: B023
            found.append(at_once.most(following, cache))
        return found

    alone, two, four = numbers(1), numbers(2), numbers(4)
    assert {1, 12} < set(alone) <= set(range(1, 13))
    assert two[1:] == alone[:-1]
    assert four[2:] == alone[:-2]


def test_padding_has_no_token_that_the_prompt_has_not():
    questions = [Question(1, {"document": "a", "question": "b"}) for _ in range(2)]
    following = [
        FollowingQuestion(question, [7] * length, 9) for question, length in zip(questions, (3, 1), strict=True)
    ]
    input_ids, mask = prompts_together(torch.tensor([[5, 6]]), following)
    assert input_ids.tolist() == [[5, 6, 7, 7, 7], [5, 6, 6, 6, 7]]
    assert mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", ["--at-once", "2", "--bits", "2"]), ("gemma3", []), ("qwen3_next", ["--bits", "2"])],
)
def test_documents_are_as_they_were_after_each_group(batch: Batch, family: str, options: list[str], tmp_path: Path):
    batch.model = word_model_in(tmp_path / family, family)
    document = batch.document("long.txt", 300)
    pair = [{"document": document, "question": text} for text in ("w3 w1 w4 " * 30, "w9")]
    batch.ask(*({**pair[number % 2], "id": number} for number in range(6)))
    assert batch.run(*options).exit_code == 0
    texts = [answer["answer"] for answer in batch.answers()]
    assert texts == 3 * texts[:2]


def test_answers_at_once_end_where_each_of_them_ends(batch: Batch, tmp_path: Path):
    questions_of_different_lengths(batch)
    assert batch.run().exit_code == 0
    ending = batch.answers()[0]["answer"].split()[1]
    batch.model = shutil.copytree(batch.model, tmp_path / "ending")
    settings = batch.model / "generation_config.json"
    end = int(ending.removeprefix("w"))
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": end}))
    results = []
    for at_once in (1, 6):
        batch.out.unlink()
        assert batch.run("--at-once", at_once).exit_code == 0
        results.append([(each["answer"], each["answer_tokens"], each["finish_reason"]) for each in batch.answers()])
    alone, together = results
    assert together == alone
    assert {reason for _, _, reason in alone[: len(LENGTHS)]} == {"stop", "length"}


def test_questions_at_once_whose_answer_has_less_room_are_alone(batch: Batch):
    document = batch.document("long.txt", 200)
    texts = ["w1", "w2 w3", "w1 " * 308, "w4", "w5 w6", "w1 " * 600]
    batch.ask(*({"document": document, "question": text, "id": number} for number, text in enumerate(texts)))
    assert batch.run("--at-once", "10").exit_code == 1
    by_id = {answer["id"]: answer for answer in batch.answers()}
    assert [by_id[number].get("at_once") for number in range(len(texts))] == [2, 2, 1, 2, 2, None]
    assert by_id[2]["finish_reason"] == "context"
    assert "Ask a shorter question" in by_id[5]["error"]


@pytest.mark.parametrize("options", [[], ["--bits", "8"]])
def test_fewer_questions_are_asked_at_once_when_memory_ends(
    batch: Batch, options: list[str], monkeypatch: pytest.MonkeyPatch
):
    questions_of_different_lengths(batch)
    assert batch.run("--at-once", "2", *options).exit_code == 0
    texts = batch.texts()
    batch.out.unlink()

    class Recorder(timed_run._Recorder):
        """Memory ends with the second token of more than two answers."""

        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.rows) > 2 and len(self.tokens) == 2:
                raise MemoryError("no room")

    monkeypatch.setattr(timed_run, "_Recorder", Recorder)
    result = batch.run("--at-once", "5", *options)
    assert result.exit_code == 0, result.stderr
    assert "memory ends with 5 questions at once, going on with 2: no room" in result.stderr
    assert {answer["at_once"] for answer in batch.answers()} == {2}
    assert batch.texts() == texts


@pytest.mark.parametrize("at_once", [1, 5])
def test_document_when_memory_has_ended_then_comes_from_the_store_once(
    batch: Batch, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    document, kept = batch.document("long.txt", 300), batch.folder / "kept"
    batch.ask(*({"document": document, "question": f"w{number}"} for number in range(5 if at_once > 1 else 2)))
    assert batch.run("--keep", kept).exit_code == 0
    texts = batch.texts()
    batch.out.unlink()
    has_ended = []

    class Recorder(timed_run._Recorder):
        """Memory ends once, with the second token."""

        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) == 2 and not has_ended:
                has_ended.append(True)
                raise MemoryError("no room")

    monkeypatch.setattr(timed_run, "_Recorder", Recorder)
    result = batch.run("--keep", kept, "--at-once", at_once)
    assert result.stderr.count(f"300 of 300 tokens from {kept}") == 2
    answered = {(each["document"], each["question"]): each.get("answer") for each in batch.answers()}
    assert [answered[key] for key in texts if answered[key] != texts[key]] == ([None] if at_once == 1 else [])


def test_answers_go_on_with_another_number_at_once(batch: Batch):
    questions_of_different_lengths(batch)
    assert batch.run("--at-once", "3").exit_code == 0
    texts = batch.texts()
    lines = batch.out.read_text().splitlines(keepends=True)
    batch.out.write_text("".join(lines[:2]))
    again = batch.run("--at-once", "4")
    assert again.exit_code == 0, again.stderr
    assert f"2 of {2 * len(LENGTHS)} questions were answered before" in again.stderr
    assert batch.texts() == texts


@pytest.mark.parametrize("at_once", ["4", "auto"])
def test_one_question_at_a_time_is_asked_where_padding_counts(batch: Batch, tmp_path: Path, at_once: str):
    batch.model = word_model_in(tmp_path / "gemma3", "gemma3")
    questions_of_different_lengths(batch)
    result = batch.run("--at-once", at_once)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("its questions are answered one at a time") == 1
    assert {answer["at_once"] for answer in batch.answers()} == {1}


def test_with_a_context_only_the_start_of_a_document_is_read(batch: Batch):
    batch.ask({"document": batch.document("long.txt", 600), "question": "w1"})
    assert batch.run("--context", "100").exit_code == 0
    (answer,) = batch.answers()
    assert (answer["document_tokens"], answer["read_tokens"]) == (600, 100)


@pytest.mark.filterwarnings("default:.* was removed from the store")
@pytest.mark.parametrize("options", [[], ["--cache", "offloaded"]])
def test_a_kept_document_gives_the_same_answers_and_is_not_computed_again(batch: Batch, options: list[str]):
    two_documents(batch)
    assert batch.run(*options).exit_code == 0
    unkept, kept = batch.texts(), batch.folder / "kept"
    texts = []
    for _ in range(2):
        batch.out.unlink()
        result = batch.run("--keep", kept, *options)
        assert result.exit_code == 0, result.stderr
        texts.append(batch.texts())
    assert texts == [unkept, unkept]
    assert f"300 of 300 tokens from {kept}" in result.stderr
    titles = {each.title for each in PrefixStore(kept).kept_prompts()}
    assert "long.txt" in titles
    for node in (kept / "nodes").iterdir():
        node.write_bytes(node.read_bytes()[:-1000])
    batch.out.unlink()
    again = batch.run("--keep", kept, *options)
    assert again.exit_code == 0, again.stderr
    assert f"0 of 300 tokens from {kept}" in again.stderr
    assert batch.texts() == unkept


def test_a_document_that_a_kept_one_begins_like_is_read_from_there_on(batch: Batch):
    two_documents(batch)
    assert batch.run("--keep", batch.folder / "kept").exit_code == 0
    words = (batch.folder / "long.txt").read_text().split()
    (batch.folder / "long.txt").write_text(" ".join([*words[:250], *words[:130:-1]]))
    batch.out.unlink()
    result = batch.run("--keep", batch.folder / "kept", "--at-once", "3")
    assert result.exit_code == 0, result.stderr
    assert f"250 of 419 tokens from {batch.folder / 'kept'}, the first difference at token 250: '" in result.stderr
    texts = batch.texts()
    batch.out.unlink()
    assert batch.run().exit_code == 0
    assert batch.texts() == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON (Expecting property name"),
        (b"[" * 100_000, "not JSON that can be read"),
        (b'{"document": "\xff"}', "not UTF-8 text (byte 15 is 0xff)"),
        (rb'{"document": "a", "question": "\ud800"}', "not UTF-8 text"),
        (b'{"document": "a", "question": "b", "topic": NaN}', "not JSON that can be read (Out of range"),
        (b'{"document": "a", "question": "b", "topic": [1e999]}', "not JSON that can be read (Out of range"),
        (
            b'{"document": "a", "question": "b", "id": 3, "id": 4}',
            "not JSON that can be read (the key 'id' is given twice)",
        ),
        (b"[]", "not an object"),
        (b'{"document": "a"}', "'question' must be text, got None"),
        (b'{"document": "a", "question": " "}', "'question' must be text"),
        (b'{"document": "a", "question": "b", "id": 1.5}', "'id' must be text or an integer, got 1.5"),
        (b'{"document": "a", "question": "b", "answer": 1, "settings": 2}', "have a field 'answer', 'settings'"),
        (b'{"document": "a", "question": "q"}', "the document and the question of line 1"),
        (b'{"document": "a", "question": "b", "id": 2}', "the id 2 of line 2"),
    ],
)
def test_question_line_when_wrong_then_is_refused_before_loading(batch: Batch, line: bytes, message: str):
    good = b'{"document": "a", "question": "q"}\n{"document": "a", "question": "q", "id": 2}\n'
    batch.questions.write_bytes(good + line)
    result = batch.run()
    assert result.exit_code == 2
    assert "has 1 line that cannot be used:\n" in result.stderr
    assert f"  line 3: {message}" in result.stderr or f"  line 3: answers {message}" in result.stderr
    assert not batch.out.exists()


def test_all_lines_that_cannot_be_used_are_reported_at_once(batch: Batch):
    batch.questions.write_text("{}\n\n" * 14)
    said = batch.run().stderr
    assert "has 14 lines that cannot be used:" in said
    assert [line.partition(":")[0].strip() for line in said.splitlines() if "must be" in line] == [
        f"line {number}" for number in range(1, 21, 2)
    ]
    assert "  and 4 more\nA question is a line such as" in said


def test_questions_when_file_is_missing_then_error_is_a_sentence(batch: Batch):
    batch.questions.write_text("\n")
    assert "has no questions" in batch.run().stderr
    batch.questions.unlink()
    result = batch.run()
    assert result.exit_code == 2
    assert "questions.jsonl: No such file or directory.\n" in result.stderr
    assert "Errno" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "3"], "--bits must be 8, 4 or 2, got 3"),
        (["--cache", "stock"], "--cache 'stock' is not one of"),
        (["--bits", "4", "--cache", "dynamic"], "--bits is for --cache quantized"),
        (["--at-once", "0"], "--at-once must be at least 1, got 0; 1 answers one question at a time."),
        (["--at-once", "all"], "--at-once must be a number or auto, got 'all'."),
        (["--out", os.devnull], f"--out {os.devnull} is no regular file: name one, or - for standard output."),
        (["--jobs", "2"], "--jobs and --job-option are for jobs"),
        (["--out", "-", "--executor", "local"], "--out - is standard output"),
        (["--executor", "cloud"], "--executor 'cloud' is not one of local, slurm, debug"),
        (["--executor", "local", "--job-option", "minutes"], "'minutes' is not NAME=VALUE"),
        (["--executor", "local", "--job-option", "minutes=3"], "minutes"),
        (["--executor", "slurm"], "--executor slurm"),
    ],
)
def test_options_that_cannot_be_used_are_refused_in_one_line(batch: Batch, options: list[str], message: str):
    two_documents(batch)
    result = batch.run(*options)
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_answers_of_other_options_are_not_mixed_in(batch: Batch):
    two_documents(batch)
    assert batch.run().exit_code == 0
    written = batch.out.read_bytes()
    other = batch.run("--bits", "4")
    assert other.exit_code == 2
    assert "were given with cache=dynamic, not quantized" in other.stderr
    assert batch.out.read_bytes() == written
    batch.out.write_bytes(b'"answer document question"\n' + written)
    assert "line 1: not an answer" in batch.run().stderr
    batch.out.write_bytes(written.replace(b'"answer": ', b'"answer": "w1", "answer": ', 1))
    assert "line 1: not an answer of this command (the key 'answer' is given twice)." in batch.run().stderr


@needs_signals
def test_batch_when_another_one_writes_then_is_refused_until_it_is_killed(batch: Batch):
    two_documents(batch)
    first = batch.start()
    while not batch.out.exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    refused = batch.run()
    first.kill()
    first.communicate()
    assert refused.exit_code == 2
    assert refused.stderr == f"error: Another batch writes into {batch.out} now: wait for it, or give another --out.\n"
    assert batch.run().exit_code == 0
    assert len(batch.answers()) == 4


def test_batch_when_a_document_has_changed_then_only_its_answers_are_new(batch: Batch):
    two_documents(batch)
    (batch.folder / "many").mkdir()
    batch.document("many/a.txt", 30)
    batch.ask(*({"document": name, "question": "w3"} for name in ("long.txt", "short.txt", "many")))
    assert batch.run().exit_code == 0
    before = batch.by_question()
    batch.document("short.txt", 20, first=9)
    batch.document("many/b.txt", 30)
    (batch.folder / "long.txt").unlink()  # what was answered about it stays
    again = batch.run()
    assert again.exit_code == 0, again.stderr
    assert "2 of 3 questions are asked again, because a document or the model has changed since\n" in again.stderr
    assert "1 of 3 questions were answered before\n" in again.stderr
    after = batch.by_question()
    assert after["long.txt", "w3"] == before["long.txt", "w3"]
    assert after["many", "w3"]["document_tokens"] > before["many", "w3"]["document_tokens"]
    assert after["short.txt", "w3"]["document_digest"] != before["short.txt", "w3"]["document_digest"]


def test_batch_when_model_in_its_folder_has_changed_then_all_are_asked(batch: Batch, tmp_path: Path):
    two_documents(batch)
    batch.model = shutil.copytree(batch.model, tmp_path / "trained")
    assert batch.run().exit_code == 0
    before = batch.texts()
    model = AutoModelForCausalLM.from_pretrained(batch.model)
    model.model.embed_tokens.weight.data.mul_(-1)
    model.save_pretrained(batch.model)
    again = batch.run()
    assert "4 of 4 questions are asked again, because a document or the model has changed since\n" in again.stderr
    assert batch.texts().keys() == before.keys()
    assert batch.texts() != before


def test_questions_when_file_has_byte_order_mark_then_are_read(batch: Batch):
    two_documents(batch)
    batch.questions.write_bytes(b"\xef\xbb\xbf" + batch.questions.read_bytes())
    assert batch.run().exit_code == 0
    batch.out.write_bytes(b"\xef\xbb\xbf" + batch.out.read_bytes())
    assert "4 of 4 questions were answered before" in batch.run().stderr


def test_questions_when_moved_or_dropped_then_only_new_ones_are_asked(batch: Batch):
    two_documents(batch)
    assert batch.run().exit_code == 0
    before = batch.out.read_text().splitlines()
    batch.ask(
        {"document": "long.txt", "question": "w8"},
        {"document": "long.txt", "question": "w9", "id": 7},
        {"document": "long.txt", "question": "w9"},
        {"document": "long.txt", "question": "w3 w1 w4"},
    )
    changed = batch.run()
    assert changed.exit_code == 0, changed.stderr
    assert "not asked any more: 2; they stay in" in changed.stderr
    assert "2 of 4 questions were answered before" in changed.stderr
    assert "4 of 4 questions are answered" in changed.stderr
    after = batch.out.read_text().splitlines()
    assert after[: len(before)] == before
    new = [json.loads(line) for line in after[len(before) :]]
    assert [(answer["question"], "id" in answer) for answer in new] == [("w8", False), ("w9", False)]


def test_question_fields_when_answered_then_are_in_the_answer(batch: Batch):
    document = batch.document("short.txt", 20)
    odd = {"topic": ["a", {"b": None}], "text": "\x9b\u2028\u00e4"}
    lines = [
        {"document": document, "question": "w1", **odd},
        {"document": "none.txt", "question": "w1", "topic": 3},
    ]
    batch.ask(*lines)
    assert batch.run().exit_code == 1
    assert [{**answer, **line} for answer, line in zip(batch.answers(), lines, strict=True)] == batch.answers()
    given = batch.answers()[0]
    batch.ask({"document": document, "question": "w1", "topic": "new"})
    result = batch.run()
    assert "1 of 1 questions were answered before" in result.stderr
    del given["text"]
    assert batch.answers() == [{**given, "topic": "new"}]


def test_question_fields_when_named_as_answer_fields_then_are_refused(batch: Batch):
    (batch.folder / "many").mkdir()
    (batch.folder / "many" / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    for name in ("many/a.txt", "many/b.txt"):
        batch.document(name, 9)
    documents = batch.document("short.txt", 20), "none", ["many", "short.txt"]
    batch.ask(*({"document": document, "question": "w1"} for document in documents))
    assert batch.run().exit_code == 1
    fields = {name for answer in batch.answers() for name in answer}
    assert fields - {"document", "question"} == set(RESULT_FIELDS)


def test_answers_when_on_standard_output_then_equal_those_of_a_file(batch: Batch):
    two_documents(batch)
    assert batch.run().exit_code == 0
    texts = batch.texts()
    batch.out.unlink()
    batch.document("short.txt", 0)
    for _ in range(2):
        printed = batch.run("--out", "-")
        assert printed.exit_code == 1
        answers = [json.loads(line) for line in printed.stdout.splitlines()]
        assert [answer["document"] for answer in answers] == 3 * ["long.txt"] + ["short.txt"]
        assert all(texts["long.txt", answer["question"]] == answer["answer"] for answer in answers[:3])
        assert "is empty" in answers[3]["error"]
        assert "3 of 4 questions are answered\n" in printed.stderr
    assert sorted(path.name for path in batch.folder.glob("[!.]*")) == ["long.txt", "questions.jsonl", "short.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs links of POSIX")
def test_answers_when_out_is_a_link_then_are_in_its_target(batch: Batch):
    batch.ask({"document": batch.document("short.txt", 20), "question": "w1"})
    target = batch.folder / "target.jsonl"
    target.touch(0o600)
    batch.out.symlink_to(target)
    assert batch.run().exit_code == 0
    assert batch.out.is_symlink()
    assert target.read_text().count("\n") == 1
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes of POSIX")
def test_a_pipe_as_out_is_refused_in_one_line(batch: Batch):
    batch.ask({"document": batch.document("short.txt", 20), "question": "w1"})
    os.mkfifo(batch.out)
    result = batch.run()
    assert result.exit_code == 2
    assert result.stderr == f"error: --out {batch.out} is no regular file: name one, or - for standard output.\n"
    assert batch.out.is_fifo()


@pytest.mark.parametrize("as_list", [True, False])
def test_an_answer_says_that_the_model_ended_it(batch: Batch, as_list: bool, tmp_path: Path):
    batch.ask({"document": batch.document("short.txt", 20), "question": "w1"})
    assert batch.run().exit_code == 0
    words = batch.answers()[0]["answer"].split()
    last = int(words[1].removeprefix("w"))
    batch.model = shutil.copytree(batch.model, tmp_path / "ending")
    settings = batch.model / "generation_config.json"
    ends = {"eos_token_id": [VOCAB_SIZE - 1, last] if as_list else last}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **ends}))
    batch.out.unlink()
    assert batch.run().exit_code == 0
    (answer,) = batch.answers()
    assert (answer["finish_reason"], answer["answer_tokens"]) == ("stop", words.index(words[1]) + 1)


def test_answer_when_context_leaves_less_room_then_says_so(batch: Batch):
    document = batch.document("long.txt", 200)
    batch.ask({"document": document, "question": "w1"}, {"document": document, "question": "w1 " * 308})
    assert batch.run().exit_code == 0
    short, long = batch.answers()
    assert (short["finish_reason"], short["answer_tokens"]) == ("length", NEW_TOKENS)
    assert long["finish_reason"] == "context"
    assert long["prompt_tokens"] + long["answer_tokens"] == 512
    assert long["answer_tokens"] < NEW_TOKENS


def test_a_line_that_was_cut_off_is_asked_again(batch: Batch):
    two_documents(batch)
    assert batch.run().exit_code == 0
    texts, content = batch.texts(), batch.out.read_bytes()
    batch.out.write_bytes(content[:-20])
    assert batch.run().exit_code == 0
    assert batch.texts() == texts


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_jobs_give_the_same_answers(batch: Batch, jobs: str):
    pytest.importorskip("submitit", reason="needs submitit")
    two_documents(batch)
    assert batch.run().exit_code == 0
    alone = batch.texts()
    batch.out.unlink()
    result = batch.run("--executor", "local", "--jobs", jobs)
    assert result.exit_code == 0, result.stderr
    assert batch.texts() == alone
    assert [path.name for path in batch.folder.iterdir() if "parts" in path.name] == []


@pytest.mark.slow
def test_questions_of_a_job_that_failed_say_why_and_are_asked_again(batch: Batch):
    pytest.importorskip("submitit", reason="needs submitit")
    two_documents(batch)
    model, batch.model = batch.model, batch.folder / "nowhere"
    failed = batch.run("--executor", "local")
    assert failed.exit_code == 1
    assert all("the job ended before: " in answer["error"] for answer in batch.answers())
    assert all("nowhere" in answer["error"] for answer in batch.answers())
    assert "what it printed is in" in failed.stderr
    batch.model = model
    assert batch.run().exit_code == 0
    assert len(batch.texts()) == 4


@pytest.mark.slow
@needs_signals
@pytest.mark.parametrize("options", [[], ["--executor", "local", "--jobs", "2"]], ids=["no jobs", "two jobs"])
def test_batch_when_killed_in_the_middle_then_finishes_200_documents(batch: Batch, options: list[str]):
    if options:
        pytest.importorskip("submitit", reason="needs submitit")
    batch.ask(*({"document": batch.document(f"{index}.txt", 40, index), "question": "w1 w2"} for index in range(200)))
    parts = batch.folder / "answers.jsonl.parts"

    def given() -> int:
        files = [batch.out, *parts.glob("*.jsonl")]
        return sum(path.read_bytes().count(b"\n") for path in files if path.exists())

    process = batch.start(*options)
    while given() < 30:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    # Jobs are ended by Ctrl-C, because nobody else would end them; without jobs the process is killed.
    process.send_signal(signal.SIGINT if options else signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGKILL)
    assert "the same command goes on" in said or not options
    time.sleep(1)
    between = given()
    assert 30 <= between < 200
    before = batch.texts() if batch.out.exists() else {}
    result = batch.run()
    assert result.exit_code == 0, result.stderr
    assert len(batch.answers()) == 200
    texts = batch.texts()
    assert set(texts) == {(f"{index}.txt", "w1 w2") for index in range(200)}
    assert {key: texts[key] for key in before} == before
