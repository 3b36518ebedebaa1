"""`generate`: a question, alone or about documents, in this process where that is enough."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from hf_hybrid_cache import AnswerSettings, Chat, QuantizedWeightsConfig, models
from hf_hybrid_cache.cli.console import without_controls
from hf_hybrid_cache.prefix_store import PrefixStore

from .commands import SHORT, error_of, lines, run
from chat.thoughts import tokenizer_of
from models.byte_tokenizer import model_in
from models.expert_models import expert_model
from models.word_tokenizer import word_tokenizer

TEXT = "Nobody said a word. " * 80 + "It was signed by Ada in London."
FIELDS = (
    "model cache bits weights documents left_out answer finish_reason prompt_tokens answer_tokens "
    "drafted_tokens accepted_tokens document_tokens read_tokens stored_tokens first_token_seconds "
    "tokens_per_second kv_device_bytes kv_host_bytes"
)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can attend to 512 bytes."""
    return model_in(tmp_path_factory.mktemp("small"), 512)


def generate(model: Path | str, *options: object, **how: Any) -> Result:
    return run("generate", "--model", model, *SHORT, "--max-new-tokens", 9, *options, **how)


def answered(model: Path, *options: object, **how: Any) -> dict[str, Any]:
    """Return the line of JSON, beside which nothing is said."""
    result = generate(model, *options, "--json", "--quiet", **how)
    assert result.stderr == ""
    (line,) = lines(result)
    return line


def remarks(model: Path, *options: object) -> list[str]:
    return generate(model, *options).stderr.splitlines()


# Answers


def engine_of(folder: Path, document: Path | None = None, **options: Any) -> Chat:
    """A conversation with the model of a folder, whose answers other tests compare with those of `generate`."""
    model, tokenizer = models.load(str(folder), torch.float32, "cpu", **options)
    documents = () if document is None else (document,)
    return Chat(model, tokenizer, documents, settings=AnswerSettings(max_new_tokens=9), progress=False)


@pytest.mark.parametrize("cache", ["dynamic", "offloaded"])
def test_answers_are_those_of_the_engine(cache: str, model: Path, report: Path, folder: Path):
    of_cache = ["--cache", cache]
    for document in (None, report):
        engine = engine_of(model, document)
        found = answered(model, *["--document", report] * bool(document), "--question", "Who?", *of_cache)
        assert found["answer"] == "".join(engine.ask("Who?")).strip()
        assert (found["cache"], len(found["documents"])) == (cache, bool(document))
    report.write_text(TEXT, encoding="utf-8-sig")
    for is_stored in (False, True):
        result = generate(model, "--document", report, "Who?", "--store", folder, *of_cache)
        assert (f" tokens are taken from {folder}" in result.stderr) == is_stored
        assert result.stdout.strip() == without_controls(found["answer"]).strip()


def test_a_model_with_experts_answers_as_one_that_is_loaded_so(tmp_path: Path):
    expert_model("mixtral").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    found = answered(tmp_path, "w3 w7 w20 w9", "--experts", "host", "--weights", 4)["answer"]
    engine = engine_of(tmp_path, quantization_config=QuantizedWeightsConfig(bits=4, only_experts=True))
    assert found == "".join(engine.ask("w3 w7 w20 w9")).strip()


def test_json_tells_what_was_asked_read_left_out_and_taken(model: Path, report: Path):
    (report.parent / "picture.txt").write_bytes(b"a\0b")
    found = answered(model, "--document", report.parent, "--question", "Who?", "--bits", "8", "--context", "100")
    assert list(found) == FIELDS.split()
    assert (found["model"], found["cache"], found["bits"], found["weights"]) == (str(model), "quantized", 8, None)
    assert found["documents"] == [{"name": str(report), "tokens": len(TEXT), "read_tokens": 100}]
    assert ["picture.txt" in sentence for sentence in found["left_out"]] == [True]
    assert (found["document_tokens"], found["read_tokens"]) == (len(TEXT), 100)
    assert (found["finish_reason"], found["answer_tokens"]) == ("length", 9)
    assert found["kv_device_bytes"] == 0 < found["kv_host_bytes"]
    said = generate(model, "--document", "-", "--question", "Who?", "--weights", 8, typed=TEXT).stderr
    assert "model: float32 on cpu\n" in said
    assert "\ndocument: 1,631 of 1,631 tokens\nended at --max-new-tokens 9, which may be raised\n" in said
    assert re.search(r"MiB on the host; weights [\d.]+ MiB in 8 bits\n$", said)


def test_a_thought_is_a_remark_and_no_part_of_the_answer(tmp_path: Path):
    thinks = model_in(tmp_path / "model", 1024, tokenizer_of("R1, of many tokens"), eos_token_id=None)
    asked = ["--question", "Who?", "--max-thinking-tokens", 20]
    found = answered(thinks, *asked)
    assert 0 < len(found["thinking"]) <= 20
    assert found["thinking_tokens"] == 20 + len("\n</think>\n\n")
    assert found["answer_tokens"] == found["thinking_tokens"] + 9
    said = generate(thinks, *asked)
    assert said.stdout.strip() == found["answer"]
    assert f"\n{found['thinking']}\n" in said.stderr
    assert "the thought was long enough to be closed: --max-thinking-tokens 40 allows more\n" in said.stderr
    assert "to be closed" not in generate(thinks, *asked, "--no-thinking").stderr
    without = answered(thinks, *asked, "--no-thinking")
    assert (without["thinking"], without["answer_tokens"]) == ("", found["answer_tokens"] - 20)


def test_an_answer_that_ends_within_its_thought_says_so(tmp_path: Path):
    tokenizer = tokenizer_of("R1, of many tokens")  # whose prompt begins the thought
    folder = model_in(tmp_path / "model", 1024, tokenizer, eos_token_id=list(range(len(tokenizer))))
    found = answered(folder, "--question", "Who?")
    assert (found["answer"], found["thinking_tokens"], found["finish_reason"]) == ("", 1, "stop")
    said = "no answer: it ended within its thought, after 1 tokens; {} leaves that out"
    assert said.format("--no-thinking") in generate(folder, "--question", "Who?").stderr
    assert said.format("/set thinking no") in run("chat", "--model", folder, typed="Who?\n").stderr


SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "min_p": 0.1}


def test_what_a_model_asks_for_and_answers_do_not_follow_is_said(small: Path, tmp_path: Path):
    theirs = model_in(tmp_path / "model", 512, no_repeat_ngram_size=1, use_cache=False, **SAMPLED)
    result = generate(theirs, "--question", "Who?")
    assert result.stdout == generate(small, "--question", "Who?").stdout
    said = result.stderr.splitlines()
    assert "answers do not follow what the model's generation config says of no_repeat_ngram_size 1" in said
    wished = "--temperature 0.6 --top-p 0.95 --min-p 0.1"
    assert f"the model's makers sample with {wished}; answers follow the options alone" in said
    sampled = generate(theirs, "--question", "Who?", *wished.split(), "--seed", "3").stdout
    assert sampled == generate(small, "--question", "Who?", *wished.split(), "--seed", "3").stdout != result.stdout


# Where documents come from


def test_what_is_piped_is_the_document_unless_one_is_named(model: Path, report: Path, folder: Path):
    named = answered(model, "--document", report, "Who?")
    piped = answered(model, "Who?", typed=TEXT)
    assert [each["tokens"] for each in piped["documents"]] == [len(TEXT)]
    assert piped["answer"] == answered(model, "-q", "Who?", "--document", "-", typed=TEXT)["answer"] == named["answer"]
    both = answered(model, "Who?", "--document", report, "-", typed="Read, too.")["documents"]
    assert [each["name"] for each in both] == [str(report), "standard input"]
    assert answered(model, "Who?", typed="\n")["documents"] == []
    kept = generate(model, "--store", folder, typed=TEXT).stderr
    assert "the document is standard input, as no --document names another\n" in kept
    (stored,) = PrefixStore(folder).prompts()
    assert (stored.title, len(stored.token_ids) >= len(TEXT)) == ("standard input", True)


@pytest.mark.parametrize("given", ["--document", "--compare"])
def test_what_is_piped_where_nothing_reads_it_is_refused(given: str, report: Path):
    refused = run("generate", "Who?", given, *[report] * (given != "--compare"), typed="Never read.", code=2)
    assert "What comes on standard input would not be read: name it as a document, --document -" in refused.stderr


def test_an_option_takes_all_documents_that_follow_it(model: Path, report: Path):
    (report.parent / "more").mkdir()
    (report.parent / "more" / "b.txt").write_text("Ada")
    for given in (["--document", report, report.parent / "more"], [f"--document={report}", report.parent / "more"]):
        found = answered(model, *given, "--context", 9, "Who?")
        assert [each["name"] for each in found["documents"]] == [str(report), str(report.parent / "more" / "b.txt")]
        assert found["prompt_tokens"] == answered(model, *given, "--context", 9, "-q", "Who?")["prompt_tokens"]


# Documents that do not fit


def test_a_document_that_is_cut_is_said_before_the_answer(small: Path, report: Path):
    asked = ["--document", report, "--question", "Who?"]
    said = generate(small, *asked, "--context", "150").stdout
    begin, end = "[Only the first 150 of the document's 1,631 tokens were read (--context 150). ", "1,481.]\n\n"
    assert said.startswith(f"{begin}The answer knows nothing of the last {end}")
    said = generate(small, *asked, "--max-new-tokens", 490)
    found = re.search(r"tokens were read \(the context is 512, of which (\d+) are left to ask", said.stdout)
    assert found is not None
    assert 128 <= int(found[1]) < 160  # a quarter of the context, and the question
    assert "\nended at the model's context of 512 tokens: --context reads less of a document\n" in said.stderr
    few = generate(small, *asked, "--max-new-tokens", 3)  # for which just as much is left
    assert "tokens were read (the context is 512" in few.stdout
    assert "\nended at --max-new-tokens 3, which may be raised\n" in few.stderr
    assert "the context is 512" in generate(small, *asked, "--context", 500).stdout
    assert "Only the first" not in generate(small, *asked, "--json").stdout
    given = ["generate", "--model", small, "--device", "cpu"]
    assert "tokens are left for the document, and the" in error_of(*given, *asked, "--system", "Be brief. " * 37)
    assert "--context 9 is of documents, and there is none" in remarks(small, "Who?", "--context", 9)


def test_of_several_documents_whole_cut_and_left_out_ones_are_named(
    model: Path, report: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(report.parent)  # names are part of the text, and have as many tokens wherever this is
    for number, name in enumerate(("a.txt", "b.md", "c.txt")):
        Path(name).write_text("Ada signed it. " * 9 * number + "She did.")
    report.unlink()
    said = re.match(
        r"\[Only the first 150 of the 3 documents' (\d+) tokens were read \(--context 150\)\. Whole: a\.txt\. "
        r"Cut: b\.md \((\d+) of (\d+) tokens\)\. Left out: c\.txt\. "
        r"The answer knows nothing of the last (\d+)\.\]\n\n",
        generate(model, "--document", ".", "--context", 150, "--question", "Who?").stdout,
    )
    assert said is not None
    total, kept, whole, lost = map(int, said.groups())
    assert total - lost == 150
    assert 0 < kept < whole


# Documents of a prefix store


def test_a_document_in_another_form_is_said_and_explained_if_asked(model: Path, report: Path, folder: Path):
    kept = generate(model, "--document", report, "--store", folder, "--weights", "8")
    assert kept.stdout == ""
    (stored,) = PrefixStore(folder).prompts()
    assert f"{len(stored.token_ids):,} tokens are read and kept in {folder} in " in kept.stderr
    assert (stored.title, stored.is_conversation, stored.details["model"]) == ("report.txt", False, str(model))
    asked = ["--document", report, "--question", "Who?", "--store", folder]
    for given, said in (
        ([], "with --weights 8, which takes it from there; without --weights it is read anew"),
        (["--bits", "4"], "without --bits, which takes it from there; with --bits 4 it is read anew"),
        (["--bits", "8"], "with --bits 4, which takes it from there; with --bits 8 it is read anew"),
    ):
        lines = remarks(model, *asked, *given)
        assert lines.index(f"{folder} has report.txt {said}") < len(lines) - 2, lines
        assert not any("it is read anew" in line for line in remarks(model, *asked, *given))
    of_model = ["--model", model, "--device", "cpu", "--store", folder, "--weights", "4"]
    assert "without --bits it is read anew" in run("chat", "--document", report, *of_model, typed="").stderr
    questions = folder.with_suffix(".jsonl")
    questions.write_text(json.dumps({"document": str(report), "question": "Who?"}))
    assert "--bits 2 it is read anew" in run("batch", questions, "--out", "-", *of_model, "--bits", "2").stderr
    report.write_text(TEXT.replace("word. It", "word! It"))
    assert not any("it is read anew" in line for line in remarks(model, *asked, "--weights", "4"))
    assert not any("instead of" in line for line in remarks(model, *asked))
    report.write_text(TEXT.replace("word. It", "word? It"))
    explained = "\n".join(remarks(model, *asked, "--explain"))
    assert re.search(r"the first difference at token 1,\d+: '\?' instead of '[.!]'$", explained, re.MULTILINE)
    report.write_text(TEXT)
    not_used = f"{len(stored.token_ids):,} tokens are stored and not used: codecs: "
    explained = "\n".join(remarks(model, *asked, "--bits", "2", "--explain", "--quiet"))
    assert f"{not_used}8 bits there, 2 bits here" in explained
    assert f"{not_used}full precision there, 2 bits here" in explained
    taken = answered(model, *asked, "--bits", "2")
    assert taken["stored_tokens"] == len(stored.token_ids)
    full_hit = f"{len(stored.token_ids):,} of {len(stored.token_ids):,} tokens from {folder}"
    assert remarks(model, *asked, "--bits", "2", "--explain", "--quiet") == [full_hit]
    again = generate(model, *asked[:2], "--store", folder, "--bits", "2").stderr
    assert f"\n0 tokens are read and kept in {folder} in " in again


# Experts in host memory


def test_weights_and_experts_that_a_model_cannot_have_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch):
    asked = ["generate", "--model", model, "--question", "Who?"]
    assert f"{model} has no experts" in error_of(*asked, "--device", "cpu", "--experts", "host")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    for device in ([], ["--device", "cuda"]):
        error = error_of(*asked, "--weights", "4", *device)
        assert "--weights 4 is for a model on the CPU, and this one would be on cuda" in error
