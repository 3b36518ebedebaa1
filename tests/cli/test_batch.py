"""`hf-hybrid-cache batch`: every question is answered once, whatever happens in between."""

import functools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from click.testing import Result
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaModel

from hf_hybrid_cache.chat import AnswerSettings, Chat
from hf_hybrid_cache.cli.batch_files import RESULT_FIELDS, Answers
from hf_hybrid_cache.cli.loading import LoadedModel, load_model
from hf_hybrid_cache.cli.options import Model
from hf_hybrid_cache.prefix_store import PrefixStore

from .commands import run
from .terminals import Terminal
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


@pytest.mark.parametrize("bits", [None, 8])
def test_answers_are_those_of_a_conversation_also_from_a_store(batch: Batch, bits: int | None, model: Path):
    options = [] if bits is None else ["--bits", bits]
    assert "8 of 8 questions are answered" in batch.run(*options).stderr
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    settings = AnswerSettings(NEW_TOKENS)
    for answer in batch.answers():
        document = batch.folder / answer["document"]
        chat = Chat(loaded, tokenizer, [document], settings=settings, progress=False, leave=100, bits=bits)
        (alone,) = chat.ask_all([answer["question"]])
        assert (answer["answer"], answer["finish_reason"]) == (alone.text, alone.finish_reason)
        assert answer["answer_tokens"] == len(alone.token_ids)
        assert answer["prompt_tokens"] == alone.prompt_tokens > answer["read_tokens"] == answer["document_tokens"]
        assert answer["seconds"] > 0 < answer["document_seconds"]
    if bits:  # so few tokens are not quantized when they are read, and not kept
        return
    without_store, store = batch.texts(), batch.folder / "prompts"
    for is_stored in (False, True):
        batch.out.unlink()
        said = batch.run("--store", store, "--store-max", "1GiB").stderr
        assert batch.texts() == without_store
        assert (f"300 of 300 tokens are taken from {store}" in said) == is_stored
    (details,) = (each.details for each in PrefixStore(store).prompts() if each.title == "long.txt")
    assert details["model"] == str(model)


def test_an_answer_has_its_documents_and_the_fields_of_its_question_now(batch: Batch):
    (batch.folder / "texts").mkdir()
    (batch.folder / "texts/picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    first, second = batch.document("texts/a.txt", 20), batch.document("texts/b.md", 30)
    odd = {"topic": ["a", {"b": None}], "text": "\x9b\u2028\u00e4"}
    asked = [{"document": each, "question": "w3", **odd} for each in ([second, "missing"], "texts", [second, first])]
    batch.ask((), others=[*asked[1:], asked[0]])
    batch.run("--store", batch.folder / "prompts", "--context", 50, exit_code=1)
    failed, of_folder, of_list = answers = batch.answers()  # what is missing is told first
    assert [answer | question for answer, question in zip(answers, asked, strict=True)] == answers
    assert {name for answer in answers for name in answer} - asked[0].keys() == set(RESULT_FIELDS)
    assert "missing: No such file" in failed["error"]
    assert of_folder["left_out"] == ["texts/picture.png is not UTF-8 text (byte 0 is 0x89)."]
    assert of_folder["documents"] == [
        {"document": first, "tokens": 22, "read_tokens": 22},
        {"document": second, "tokens": 32, "read_tokens": 28},
    ]
    assert [each["read_tokens"] for each in of_list["documents"]] == [32, 18]
    assert "left_out" not in of_list
    batch.ask((), others=[{"document": "texts", "question": "w3", "topic": "new"}, asked[2]])
    assert "2 of 2 questions were answered before" in batch.run("--context", 50).stderr
    del of_folder["text"]
    assert batch.answers() == [of_folder | {"topic": "new"}, of_list]


def test_a_document_that_fails_is_the_error_of_its_questions(batch: Batch):
    (batch.folder / "binary.txt").write_bytes(b"w1\0w2")
    batch.ask(["binary.txt", batch.document("none.txt", 0), batch.document("large.txt", 600), "short.txt"], "w1", "w2")
    assert f"{batch.questions}, line 6: none.txt: " in batch.run(exit_code=1).stderr
    answers = batch.by_question()
    for text in ("w1", "w2"):
        assert "is a binary file" in answers["binary.txt", text]["error"]
        assert "is empty" in answers["none.txt", text]["error"]
        assert "The document has 600 tokens, of which" in answers["large.txt", text]["error"]
        assert "answer" in answers["short.txt", text]


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


@pytest.mark.parametrize("options", [["--cache", "offloaded"], ["--repetition-penalty", "1.5"]], ids=str)
def test_questions_at_once_get_the_answers_of_each_alone(batch: Batch, options: list[str]):
    batch.run(*options)
    alone = batch.by_question()
    assert {answer["at_once"] for answer in alone.values()} == {1}
    for at_once, sizes in [("3", {3, 1}), ("auto", {4})]:
        batch.out.unlink()
        batch.run("--at-once", at_once, *options)
        together = batch.by_question()
        assert list(together) == list(alone)
        assert {answer["at_once"] for answer in together.values()} == sizes
        for name in ("answer", "finish_reason", "prompt_tokens", "answer_tokens", "settings"):
            assert [each[name] for each in together.values()] == [each[name] for each in alone.values()]


def test_number_at_once_that_is_auto_begins_with_32(batch: Batch, tmp_path: Path):
    batch.ask(["short.txt"], *(f"w{number}" for number in range(40)))
    batch.run("--at-once", "auto")
    assert [answer["at_once"] for answer in batch.answers()] == 32 * [32] + 8 * [8]
    batch.model, batch.out = word_model_in(tmp_path / "gemma3", "gemma3"), tmp_path / "of_windows.jsonl"
    assert batch.run("--at-once", "auto").stderr.count("its questions are answered one at a time") == 1
    assert {answer["at_once"] for answer in batch.answers()} == {1}


@pytest.mark.parametrize("options", [["--bits", "8"], ["--at-once", "auto"]], ids=str)
def test_a_question_for_which_memory_ends_fails_alone(
    batch: Batch, options: list[str], monkeypatch: pytest.MonkeyPatch
):
    batch.run(*options)
    texts, forward, fatal = batch.texts(), LlamaModel.forward, TEXTS[1]
    batch.out.unlink()
    fatal_ids = torch.tensor([int(word.removeprefix("w")) for word in fatal.split()])

    @functools.wraps(forward)
    def without_memory(self: LlamaModel, input_ids: torch.Tensor, **options: Any) -> Any:
        if any(row[-len(fatal_ids) :].equal(fatal_ids) for row in input_ids):
            raise MemoryError("no room")
        return forward(self, input_ids, **options)

    monkeypatch.setattr(LlamaModel, "forward", without_memory)
    said, answers = batch.run(*options, exit_code=1).stderr, batch.by_question()
    errors = {key: answer["error"] for key, answer in answers.items() if "error" in answer}
    assert errors == {key: "no room" for key in texts if key[1] == fatal}
    assert all(answers[key]["answer"] == text for key, text in texts.items() if key not in errors)
    assert ("memory ended with 4 answers at once: from here on 2" in said) == ("auto" in options)


def test_what_failed_or_was_cut_off_is_asked_again_and_nothing_else(batch: Batch):
    batch.ask(["long.txt", "none.txt", "short.txt"], "w3")
    batch.questions.write_bytes(b"\xef\xbb\xbf" + batch.questions.read_bytes())
    assert f"{batch.questions}, line 2: none.txt: Cannot read" in batch.run(exit_code=1).stderr
    before = batch.by_question()
    assert [key for key, answer in before.items() if "error" in answer] == [("none.txt", "w3")]
    batch.document("none.txt", 30)
    assert "2 of 3 questions were answered before" in batch.run("--at-once", "4").stderr
    after, written = batch.by_question(), batch.out.read_bytes()
    assert after == before | {("none.txt", "w3"): after["none.txt", "w3"]}
    assert "answer" in after["none.txt", "w3"]
    batch.run()
    assert batch.out.read_bytes() == written
    batch.out.write_bytes(b"\xef\xbb\xbf" + written[:-20])
    assert "2 of 3 questions were answered before" in batch.run().stderr
    assert batch.texts() == {key: answer["answer"] for key, answer in after.items()}


def test_answers_of_other_options_are_not_mixed_in(batch: Batch):
    batch.run()
    written = batch.out.read_bytes()
    batch.out.write_bytes(written.replace(b', "top_k": null, "stop": null', b""))  # as before there were these options
    assert "8 of 8 questions were answered before" in batch.run().stderr
    for options, reason in [
        (["--bits", "4"], "given with cache=dynamic, not quantized"),
        (["--stop", "w1"], "given with stop=None, not ['w1']"),
        (["--temperature", "0.7", "--top-k", "3"], "given with sampling="),
    ]:
        assert reason in batch.run(*options, exit_code=2).stderr
    batch.out.write_bytes(written.replace(b'"answer": ', b'"answer": "w1", "answer": ', 1))
    assert "line 1: not an answer of this command (the key 'answer' is given twice)." in batch.run(exit_code=2).stderr


def test_what_was_answered_from_something_else_is_asked_again(batch: Batch, tmp_path: Path):
    batch.model = shutil.copytree(batch.model, tmp_path / "trained")
    (batch.folder / "many").mkdir()
    batch.document("many/a.txt", 30)
    batch.ask(["long.txt", "short.txt", "many"], "w3")
    batch.run()
    before = batch.by_question()
    batch.document("short.txt", 20, first=9)
    batch.document("many/b.txt", 30)
    (batch.folder / "long.txt").unlink()  # what was answered about it stays
    said = batch.run().stderr
    assert "2 of 3 questions are asked again, because a document or the model has changed since\n" in said
    assert "1 of 3 questions were answered before\n" in said
    after = batch.by_question()
    assert after["long.txt", "w3"] == before["long.txt", "w3"]
    earlier = batch.out.with_name("answers.earlier.jsonl")
    assert f"earlier answers to questions that have a new one: 2; they are in {earlier} now\n" in said
    assert [json.loads(line) for line in earlier.read_text().splitlines()] == [
        before["short.txt", "w3"], before["many", "w3"],
    ]  # fmt: skip
    assert after["many", "w3"]["document_tokens"] > before["many", "w3"]["document_tokens"]
    batch.document("long.txt", 300)
    model = AutoModelForCausalLM.from_pretrained(batch.model)
    model.model.embed_tokens.weight.data.mul_(-1)
    model.save_pretrained(tmp_path / "further")
    shutil.copy(tmp_path / "further" / "model.safetensors", batch.model)  # and nothing else has changed
    assert "3 of 3 questions are asked again" in batch.run().stderr
    assert batch.texts()["many", "w3"] != after["many", "w3"]["answer"]


@pytest.mark.parametrize("end", ["Ctrl-C", "a full disk"])
def test_an_answer_stays_until_a_new_one_is_written_whatever_ends_it(
    batch: Batch, end: str, monkeypatch: pytest.MonkeyPatch
):
    resource = pytest.importorskip("resource")  # of POSIX
    batch.run()
    before = batch.by_question()
    batch.document("long.txt", 290)
    batch.document("short.txt", 30)
    with monkeypatch.context() as ending:
        if end == "Ctrl-C":
            ask_all = Chat.ask_all

            def one(self: Chat, questions: Sequence[str], at_once: int) -> Iterator[Any]:
                yield next(ask_all(self, questions, at_once))
                raise KeyboardInterrupt

            ending.setattr(Chat, "ask_all", one)
            batch.run(exit_code=130)
        else:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            line = max(map(len, batch.out.read_bytes().splitlines()))
            resource.setrlimit(resource.RLIMIT_FSIZE, (batch.out.stat().st_size + line * 3 // 2, limits[1]))
            try:
                assert "Cannot write" in batch.run(exit_code=2).stderr
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    between = batch.by_question()
    assert before.keys() == between.keys()
    assert sum(between[key] != before[key] for key in before) == 1
    assert "7 of 8 questions are asked again" in batch.run().stderr
    earlier = batch.out.with_name("answers.earlier.jsonl").read_text().splitlines()
    assert {json.dumps(answer) for answer in before.values()} == {json.dumps(json.loads(line)) for line in earlier}


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


def test_questions_may_be_moved_added_and_dropped(batch: Batch):
    of_id = {"document": "long.txt", "question": "w9", "id": 7}
    batch.ask(["long.txt", "short.txt"], "w3", others=[of_id])
    batch.run()
    before = batch.out.read_text().splitlines()
    batch.ask(["long.txt"], "w8", "w9", "w3", others=[of_id])
    said = batch.run().stderr
    assert "not asked any more: 1; they stay in" in said
    assert "2 of 4 questions were answered before" in said
    assert "4 of 4 questions are answered" in said
    after = batch.out.read_text().splitlines()
    assert after[: len(before)] == before
    new = [json.loads(line) for line in after[len(before) :]]
    assert [(answer["question"], "id" in answer) for answer in new] == [("w8", False), ("w9", False)]


def test_shards_share_the_documents_and_their_answers_can_be_joined(batch: Batch):
    batch.ask([batch.document(f"{number}.txt", 20, number) for number in range(5)], "w1", "w2")
    batch.run()
    whole, shared, joined = batch.texts(), [], ""
    for number in (1, 2, 3):
        batch.out = batch.folder / f"answers-{number}.jsonl"
        batch.run("--shard", f"{number}/3")
        shared.append({answer["document"] for answer in batch.answers()})
        joined += batch.out.read_text()
    assert shared == [{"0.txt", "3.txt"}, {"1.txt", "4.txt"}, {"2.txt"}]
    batch.out.write_text(joined)
    assert "10 of 10 questions were answered before" in batch.run().stderr
    assert batch.texts() == whole


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
    assert "8 of 9 questions" in shown
    assert "8.txt" in shown
    assert " s left" in shown


def test_lines_that_are_no_questions_are_named_all_at_once(batch: Batch):
    batch.questions.write_text('{"document": "a", "question": "q"}\n{}\n\n[]\n' + '{"question": "q"}\n' * 12)
    said = batch.run(exit_code=2).stderr
    assert "has 14 lines that cannot be used:\n  line 2: 'document' must be" in said
    assert "  line 4: not an object\n  line 5: " in said
    assert "  and 4 more\nA question is a line such as" in said
    assert not batch.out.exists()
    batch.questions.write_text("\n")
    assert "has no questions" in batch.run(exit_code=2).stderr
