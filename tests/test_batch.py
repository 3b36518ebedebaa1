"""`hf-hybrid-cache batch`: every question is answered once, whatever happens in between."""

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
from typer.testing import CliRunner

from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.cli.batch.answers import RESULT_FIELDS
from hf_hybrid_cache.cli.runs import timed_run

from tiny_models import VOCAB_SIZE
from word_tokenizer import word_model_in

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
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"w1\0w2", "is a binary file"),
        (b"  ", "is empty"),
        (b"w1 " * 600, "The document has 600 tokens, of which"),
    ],
    ids=["missing", "not text", "binary", "empty", "too long"],
)
def test_a_document_that_fails_is_a_line_with_its_error_and_does_not_stop_the_rest(
    batch: Batch, content: bytes | None, message: str
):
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
        """Memory ends with the second token of the second answer."""

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


def test_with_a_context_only_the_start_of_a_document_is_read(batch: Batch):
    batch.ask({"document": batch.document("long.txt", 600), "question": "w1"})
    assert batch.run("--context", "100").exit_code == 0
    (answer,) = batch.answers()
    assert (answer["document_tokens"], answer["read_tokens"]) == (600, 100)


@pytest.mark.parametrize("options", [[], ["--bits", "4"]])
def test_a_kept_document_gives_the_same_answers_and_is_not_computed_again(batch: Batch, options: list[str]):
    two_documents(batch)
    kept = batch.folder / "kept"
    assert batch.run("--keep-caches", kept, *options).exit_code == 0
    first = batch.texts()
    files = sorted(kept.iterdir())
    assert [path.name.rpartition("-")[0] for path in files] == ["long", "short"]
    times = [path.stat().st_mtime_ns for path in files]
    batch.out.unlink()
    assert batch.run("--keep-caches", kept, *options).exit_code == 0
    assert batch.texts() == first
    assert [path.stat().st_mtime_ns for path in files] == times
    files[0].write_bytes(files[0].read_bytes()[:1000])
    batch.out.unlink()
    again = batch.run("--keep-caches", kept, *options)
    assert again.exit_code == 0
    assert "is computed anew" in again.stderr
    assert batch.texts() == first


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON (Expecting property name"),
        (b"[" * 100_000, "not JSON that can be read"),
        (b'{"document": "\xff"}', "not UTF-8 text (byte 15 is 0xff)"),
        (rb'{"document": "a", "question": "\ud800"}', "not UTF-8 text"),
        (b"[]", "not an object"),
        (b'{"document": "a"}', "'question' must be text, got None"),
        (b'{"document": "a", "question": " "}', "'question' must be text"),
        (b'{"document": "a", "question": "b", "id": 1.5}', "'id' must be text or an integer, got 1.5"),
        (b'{"document": "a", "question": "b", "answer": 1, "settings": 2}', "have a field 'answer', 'settings'"),
        (b'{"document": "a", "question": "q"}', "the document and the question of line 1"),
        (b'{"document": "a", "question": "b", "id": 2}', "the id 2 of line 2"),
    ],
)
def test_a_line_that_cannot_be_used_is_refused_by_its_number_before_anything_is_loaded(
    batch: Batch, line: bytes, message: str
):
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


def test_questions_that_are_missing_are_a_sentence(batch: Batch):
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


def test_when_lines_are_moved_dropped_and_added_only_the_new_ones_are_asked(batch: Batch):
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


def test_what_else_a_line_says_is_in_its_answer_as_the_line_says_it_last(batch: Batch):
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


def test_no_field_of_an_answer_can_be_one_of_a_line(batch: Batch):
    (batch.folder / "many").mkdir()
    (batch.folder / "many" / "c.png").write_bytes(b"\x89PNG\r\n")
    for name in ("many/a.txt", "many/b.txt"):
        batch.document(name, 9)
    documents = batch.document("short.txt", 20), "none", ["many", "short.txt"]
    batch.ask(*({"document": document, "question": "w1"} for document in documents))
    assert batch.run().exit_code == 1
    fields = {name for answer in batch.answers() for name in answer}
    assert fields - {"document", "question"} == set(RESULT_FIELDS)


def test_answers_on_standard_output_are_those_of_a_file_and_nothing_is_kept(batch: Batch):
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
    assert sorted(path.name for path in batch.folder.iterdir()) == ["long.txt", "questions.jsonl", "short.txt"]


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


def test_an_answer_for_which_the_context_has_less_room_than_asked_for_says_so(batch: Batch):
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
def test_two_hundred_documents_are_finished_after_the_command_was_killed_in_the_middle(
    batch: Batch, options: list[str]
):
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
    # As Ctrl-C with jobs, because nobody would end them; without, nothing may be said any more.
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
