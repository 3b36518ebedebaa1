"""`hf-hybrid-cache batch`: every question is answered once, whatever happens in between."""

import functools
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import hypothesis.strategies as st
import pytest
import torch
from click.testing import Result
from hypothesis import given
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaModel

from hf_hybrid_cache.chat import AnswerSettings, Chat
from hf_hybrid_cache.cli.batch_files import RESULT_FIELDS, Answers
from hf_hybrid_cache.cli.loading import LoadedModel, load_model
from hf_hybrid_cache.cli.options import Model
from hf_hybrid_cache.documents import Document, Documents
from hf_hybrid_cache.prefix_store import PrefixStore

from .commands import run
from .terminals import Terminal
from common.limits import limited
from common.soak import count, search_at_random
from models.tiny_models import VOCAB_SIZE
from models.word_tokenizer import word_model_in

NEW_TOKENS = 5
# Questions of different lengths.
TEXTS = tuple(" ".join(f"w{(5 + 3 * size + 11 * word) % VOCAB_SIZE}" for word in range(size)) for size in (1, 7, 2, 30))


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

    def ask(self, documents: Iterable[str], *texts: str, others: Sequence[dict[str, Any]] = ()) -> None:
        """Ask each text about all documents, in turn, and then others."""
        names = list(documents)
        asked = [{"document": name, "question": text} for text in texts for name in names]
        self.questions.write_text("".join(json.dumps(question) + "\n" for question in [*asked, *others]))

    def command(self, *options: object) -> list[object]:
        given = ["--model", self.model, "--device", "cpu", "--max-new-tokens", NEW_TOKENS, *options]
        return ["batch", self.questions, "--out", self.out, *given]

    def run(self, *options: object, exit_code: int = 0) -> Result:
        return run(*self.command(*options), code=exit_code)

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def by_question(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(answer["document"], answer["question"]): answer for answer in self.answers()}

    def texts(self) -> dict[tuple[str, str], str]:
        return {key: answer["answer"] for key, answer in self.by_question().items()}


@pytest.fixture
def batch(tmp_path: Path, model: Path) -> Batch:
    """Eight questions, four about each of two documents, in turn."""
    batch = Batch(tmp_path, model)
    batch.ask([batch.document("long.txt", 300), batch.document("short.txt", 20, first=5)], *TEXTS)
    return batch


@pytest.mark.parametrize("options", [[], ["--bits", 8]], ids=str)
def test_answers_when_documents_are_stored_then_are_the_same(batch: Batch, options: list[object], model: Path):
    store = batch.folder / "prompts"
    batch.run(*options)
    texts = batch.texts()
    for answer in batch.answers():
        assert answer["prompt_tokens"] > answer["read_tokens"] == answer["document_tokens"]
        assert (answer["finish_reason"], answer["answer_tokens"]) == ("length", NEW_TOKENS)
        assert answer["seconds"] > 0 < answer["document_seconds"]
    for is_stored in (False, True):
        batch.out.unlink()
        said = batch.run(*options, "--store", store, "--store-max", "1GiB").stderr
        assert batch.texts() == texts
        assert (f"300 of 300 tokens are taken from {store}" in said) == is_stored
    assert {each.details["model"] for each in PrefixStore(store).prompts()} == {str(model)}


def test_an_answer_has_its_documents_and_the_fields_of_its_question(batch: Batch):
    (batch.folder / "texts").mkdir()
    (batch.folder / "texts/picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    first, second = batch.document("texts/a.txt", 20), batch.document("texts/b.md", 30)
    odd = {"topic": ["a", {"b": None}], "text": "\x9b\u2028\u00e4"}
    asked = [{"document": each, "question": "w3", **odd} for each in ([second, "missing"], "texts", [second, first])]
    batch.ask((), others=[*asked[1:], asked[0]])
    batch.run("--context", 50, exit_code=1)
    failed, of_folder, of_list = answers = batch.answers()  # what is missing is told first
    assert [answer | question for answer, question in zip(answers, asked, strict=True)] == answers
    # The model does not think.
    of_thoughts = {"thinking", "thinking_tokens"}
    assert {name for answer in answers for name in answer} - asked[0].keys() == {*RESULT_FIELDS} - of_thoughts
    assert "missing: No such file" in failed["error"]
    assert of_folder["left_out"] == ["texts/picture.png is not UTF-8 text (byte 0 is 0x89)."]
    assert of_folder["documents"] == [
        {"document": first, "tokens": 22, "read_tokens": 22},
        {"document": second, "tokens": 32, "read_tokens": 28},
    ]
    assert [each["read_tokens"] for each in of_list["documents"]] == [32, 18]
    assert "left_out" not in of_list
    batch.document("texts/c.txt", 20)
    assert "1 of 3 questions are asked again" in batch.run("--context", 50, exit_code=1).stderr


@pytest.mark.parametrize(("options", "read"), [([], 300), (["--context", 100], 100)])
def test_a_question_that_does_not_fit_fails_alone(batch: Batch, options: list[object], read: int):
    batch.ask(["long.txt"], "w1", "w1 " * 600, "w1 w2 w3 " * 20)
    batch.run(*options, exit_code=1)
    long, first, last = batch.answers()
    assert "no room is left for an answer" in long["error"]
    assert (first["question"], last["question"]) == ("w1", "w1 w2 w3 " * 20)
    assert (first["document_tokens"], first["read_tokens"]) == (300, read)


def test_an_answer_that_the_context_cuts_short_says_so(batch: Batch):
    batch.ask([batch.document("long.txt", 200)], "w1", "w1 " * 308)
    batch.run("--at-once", "2")
    short, long = batch.answers()
    assert (short["finish_reason"], short["answer_tokens"]) == ("length", NEW_TOKENS)
    assert (long["finish_reason"], long["prompt_tokens"] + long["answer_tokens"]) == ("context", 512)


def test_number_at_once_is_what_is_asked_for(batch: Batch, tmp_path: Path):
    texts = [f"w{number}" for number in range(44)]
    for at_once, asked in (("32", 40), ("3", 44)):
        batch.ask(["short.txt"], *texts[:asked])
        batch.run("--at-once", at_once)
    assert [answer["at_once"] for answer in batch.answers()] == 32 * [32] + 8 * [8] + 3 * [3] + [1]
    batch.model = word_model_in(tmp_path / "gemma3", "gemma3")
    said = batch.run("--at-once", "32", "--out", tmp_path / "of_windows.jsonl").stderr
    assert said.count("its questions are answered one at a time") == 1


# Contents of a document, and the error of the questions about it if it cannot be read.
CONTENTS = {
    "w5 w9 w3 " * 7: None,
    "w8 " * 40: None,
    "w1\0w2": "is a binary file",
    "": "is empty",
    "w1 " * 600: "The document has 600 tokens, of which",
    None: "No such file",
}
READABLE = [content for content, error in CONTENTS.items() if error is None]
NAMES = ("a.txt", "b.txt", "c.txt")
MARK = b"\xef\xbb\xbf"


class Round(NamedTuple):
    """Contents of documents, questions that are asked of one of two models, and how the file and the run end."""

    contents: dict[str, str | None]
    asked: list[tuple[str, str]]
    model: int
    options: str
    is_cut_off: bool
    most: int


ROUNDS = st.builds(
    Round,
    contents=st.fixed_dictionaries(dict.fromkeys(NAMES, st.sampled_from([*READABLE, *CONTENTS]))),
    asked=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(TEXTS)), min_size=1, unique=True),
    model=st.sampled_from([0, 0, 1]),
    options=st.sampled_from(["", "--at-once 3", "--at-once 32", "--shard 1/2", "--shard 2/2"]),
    is_cut_off=st.booleans(),
    most=st.sampled_from([99, 99, 2, 0]),
)


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of weights, and their tokenizer."""
    other = AutoModelForCausalLM.from_pretrained(model)
    other.model.embed_tokens.weight.data.mul_(-1)
    other.save_pretrained(further := tmp_path_factory.mktemp("further"))
    AutoTokenizer.from_pretrained(model).save_pretrained(further)
    return [model, further]


@search_at_random(6)
@given(
    form=st.sampled_from([(), ("--cache", "offloaded"), ("--repetition-penalty", "1.5")]),
    rounds=st.lists(ROUNDS, min_size=2, max_size=4),
)
def test_any_history_of_runs_answers_as_conversations_do_and_loses_none(
    form: tuple[str, ...], rounds: list[Round], models: list[Path], tmp_path_factory: pytest.TempPathFactory
):
    """Documents and the model change, questions come and go, Ctrl-C ends a run, and a crash cuts off the last line."""
    folder = tmp_path_factory.mktemp("history")
    batch, ask_all = Batch(folder, shutil.copytree(models[0], folder / "model")), Chat.ask_all
    earlier, penalty = batch.out.with_name("answers.earlier.jsonl"), 1.5 if "1.5" in form else None
    for path in (batch.out, earlier):
        path.touch()

    def answered() -> dict[tuple[str, str], tuple[Path, str]]:
        """Return of which model, and about which content, each question was answered last."""
        ways, found = [*itertools.product(models, READABLE)], {}
        for answer in (each for each in batch.answers() if "answer" in each):
            text, said = answer["question"], answer["answer"]
            found[answer["document"], text] = next(way for way in ways if answer_of(*way, text, penalty) == said)
        return found

    for number, (contents, questions, model, options, is_cut_off, most) in enumerate(rounds):
        for name, content in contents.items():
            (folder / name).write_text(content or "")
            if content is None:
                (folder / name).unlink()
        shutil.copy2(models[model] / "model.safetensors", batch.model)
        batch.ask((), others=[{"document": name, "question": text, "round": number} for name, text in questions])
        batch.questions.write_bytes(MARK + batch.questions.read_bytes())
        shared = [*dict.fromkeys(name for name, _ in questions)]
        share = shared[options.endswith("2/2") :: 2] if "shard" in options else shared
        asked = [(name, text) for name, text in questions if name in share]
        *lines, last = batch.out.read_bytes().splitlines(keepends=True) or [b""]
        batch.out.write_bytes(b"".join(lines if is_cut_off else [*lines, last]))
        before, aside = answered(), batch.out.read_text()
        batch.out.write_bytes(MARK + b"".join(lines) + (last[:-20] if is_cut_off else last))

        kept = [key for key in asked if key in before and before[key][0] == models[model]]
        kept = [key for key in kept if contents[key[0]] in (None, before[key][1])]
        new = {key: (models[model], contents[key[0]]) for key in asked if key not in kept}
        failed = {key: CONTENTS[new.pop(key)[1]] for key in [*new] if new[key][1] not in READABLE}
        is_ended, left = most < len(new), iter(range(most))

        def until_ctrl_c(*given: Any, left: Iterator[int] = left) -> Iterator[Any]:
            for answer in ask_all(*given):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                yield answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Chat, "ask_all", until_ctrl_c)
            said = batch.run(*form, *options.split(), exit_code=130 if is_ended else int(bool(failed))).stderr
        assert (f"{len(kept)} of {len(asked)} questions were answered before" in said) == bool(kept)
        after, answers = answered(), batch.answers()
        changed = {key: way for key, way in after.items() if before.get(key) != way}
        assert before.keys() <= after.keys()
        assert changed.items() <= new.items()
        assert len(changed) == min(most, len(new))
        errors = {(answer["document"], answer["question"]): answer["error"] for answer in answers if "error" in answer}
        assert all(failed[key] in error for key, error in errors.items())
        assert is_ended or errors.keys() == failed.keys()
        assert is_ended or all(f", line {questions.index(key) + 1}: {key[0]}: " in said for key in failed)
        assert {answer["round"] for answer in answers if (answer["document"], answer["question"]) in asked} <= {number}
        there = batch.out.read_text() + earlier.read_text()
        assert {each["answer"] for each in map(json.loads, aside.splitlines()) if "answer" in each} <= {
            each.get("answer") for each in map(json.loads, there.splitlines())
        }
        count("a run of questions answers what is left")


@functools.cache
def answer_of(folder: Path, content: str, text: str, penalty: float | None) -> str:
    """Return the answer of a conversation about a document."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    documents = Documents((Document("document", content.strip()),), ())
    settings = AnswerSettings(NEW_TOKENS, repetition_penalty=penalty)
    (answer,) = Chat(model, tokenizer, documents, settings=settings, progress=False).ask_all([text])
    return answer.text


def test_a_question_for_which_memory_ends_fails_alone(batch: Batch, monkeypatch: pytest.MonkeyPatch):
    batch.run()
    texts, forward, fatal = batch.texts(), LlamaModel.forward, TEXTS[1]
    batch.out.unlink()
    fatal_ids = torch.tensor([int(word.removeprefix("w")) for word in fatal.split()])

    @functools.wraps(forward)
    def without_memory(self: LlamaModel, input_ids: torch.Tensor, **options: Any) -> Any:
        if any(row[-len(fatal_ids) :].equal(fatal_ids) for row in input_ids):
            raise MemoryError("no room")
        return forward(self, input_ids, **options)

    monkeypatch.setattr(LlamaModel, "forward", without_memory)
    assert "memory ended with 4 answers at once: from here on 2" in batch.run("--at-once", "32", exit_code=1).stderr
    answers = batch.by_question()
    failed = {key for key, answer in answers.items() if answer.get("error") == "no room"}
    assert failed == {key for key in texts if key[1] == fatal}
    assert all(answers[key]["answer"] == text for key, text in texts.items() if key not in failed)


def test_answers_of_other_options_are_not_mixed_in(batch: Batch):
    batch.run()
    assert {*batch.answers()[0]} <= {"document", "question", "id", *RESULT_FIELDS}
    written, beside = batch.out.read_bytes(), batch.out.with_name("answers.settings.jsonl")
    (settings,) = {json.dumps(json.loads(line)["settings"]) for line in beside.read_text().splitlines()}
    assert json.loads(settings)["max_new_tokens"] == NEW_TOKENS
    assert "8 of 8 questions were answered before" in batch.run().stderr
    for options, reason in [
        (["--bits", "4"], "8 answers that were given with --cache dynamic, not with --cache quantized. Add --again"),
        (["--stop", "w1"], "given without --stop, not with --stop ['w1']"),
        (["--temperature", "0.7", "--top-k", "3"], "given with --temperature 0.0, not with --temperature 0.7"),
    ]:
        assert reason in batch.run(*options, exit_code=2).stderr
    assert batch.out.read_bytes() == written
    beside.unlink()
    assert "given with other settings" in batch.run("--bits", "4", exit_code=2).stderr
    batch.out.write_bytes(written.replace(b'"answer": ', b'"answer": "w1", "answer": ', 1))
    assert "line 1: not an answer of this command (the key 'answer' is given twice)." in batch.run(exit_code=2).stderr


def test_answers_of_other_options_are_asked_again_if_told_so(batch: Batch):
    batch.run()
    before = batch.texts()
    batch.ask(["long.txt", "short.txt"], *TEXTS[:2])
    said = batch.run("--again", "--bits", 8).stderr
    assert "4 of 4 questions are asked again, because" in said
    assert "answers to questions that are not asked any more: 4" in said
    assert batch.texts().keys() == before.keys()
    assert len({answer["settings"] for answer in batch.answers()}) == 2
    assert "4 of 4 questions were answered before" in batch.run("--bits", 8).stderr
    assert "4 of 4 questions were answered before" in batch.run("--again", "--bits", 8).stderr
    earlier = map(json.loads, batch.out.with_name("answers.earlier.jsonl").read_text().splitlines())
    assert [each["answer"] for each in earlier] == [before[key] for key in batch.texts() if key[1] in TEXTS[:2]]


def test_a_limit_of_reading_keeps_answers_about_what_is_read_whole(batch: Batch):
    batch.ask(["long.txt", batch.document("too_long.txt", 600)], "w1")
    assert "Pass --context to read only the start" in batch.run(exit_code=1).stderr
    whole = batch.by_question()["long.txt", "w1"]
    assert "1 of 2 questions were answered before" in batch.run("--context", 400).stderr
    assert [each["read_tokens"] for each in batch.answers()] == [300, 400]
    assert batch.by_question()["long.txt", "w1"] == whole
    assert "2 of 2 questions were answered before" in batch.run("--context", 400).stderr
    for other in ([], ["--context", 200]):
        assert "Add --again" in batch.run(*other, exit_code=2).stderr
    assert "2 of 2 questions are asked again" in batch.run("--context", 200, "--again").stderr


def test_answers_stay_when_the_disk_is_full(batch: Batch):
    batch.run()
    before = batch.by_question()
    batch.document("long.txt", 290)
    with limited("RLIMIT_FSIZE", batch.out.stat().st_size + 100):
        assert "Cannot write" in batch.run(exit_code=2).stderr
    assert batch.by_question() == before


def test_a_model_that_comes_from_the_hub_is_the_same_in_the_next_run(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commit, place, folder = "0" * 40, tmp_path / "hub/models--ada--tiny", batch.model

    def downloaded(options: Model, cache: str, notes: Console) -> LoadedModel:
        shutil.copytree(folder, place / "snapshots" / commit)
        (place / "refs").mkdir()
        (place / "refs/main").write_text(commit)
        return load_model(options, cache, notes)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("hf_hybrid_cache.cli.loading.load_model", downloaded)
    batch.model = Path("ada/tiny")
    batch.run()
    assert {answer["model_digest"] for answer in batch.answers()} == {commit}
    assert "8 of 8 questions were answered before" in batch.run().stderr


def test_answers_on_standard_output_equal_those_of_a_file(batch: Batch):
    batch.run()
    texts = batch.texts()
    with Answers(batch.out, [], {}, batch.folder, print).alone():  # as another batch does
        said = batch.run(exit_code=2).stderr
    assert said == f"error: Another batch writes into {batch.out} now: wait for it, or give another --out.\n"
    batch.out.unlink()
    for _ in range(2):  # nothing is found again
        printed = batch.run("--out", "-")
        answers = map(json.loads, printed.stdout.splitlines())
        assert {(answer["document"], answer["question"]): answer["answer"] for answer in answers} == texts
        assert "8 of 8 questions are answered\n" in printed.stderr
    assert not batch.out.exists()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal of POSIX")
def test_a_terminal_shows_a_bar_with_the_time_that_is_left(batch: Batch):
    batch.ask((batch.document(f"{index}.txt", 40, index) for index in range(9)), "w1 w2")
    with Terminal("-m", "hf_hybrid_cache.cli", *batch.command()) as terminal:
        shown = terminal.wait_for("9 of 9 questions are answered")
        assert terminal.exit_code() == 0
    assert [part in shown for part in ("8 of 9 questions", "8.txt", " left")] == [True] * 3
