"""`generate`: a question, alone or about documents, in this process where that is enough."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_hybrid_cache import AnswerSettings, Chat, QuantizedWeightsConfig, models
from hf_hybrid_cache.chat import ChatTemplate
from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.prefix_store import PrefixStore

from common.slow import slow_but
from models.byte_tokenizer import model_in
from models.expert_models import expert_model
from models.word_tokenizer import word_tokenizer

TEXT = "Nobody said a word. " * 80 + "It was signed by Ada in London."
CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
FIELDS = (
    "model cache bits weights documents left_out answer finish_reason prompt_tokens answer_tokens document_tokens "
    "read_tokens first_token_seconds tokens_per_second kv_device_bytes kv_host_bytes"
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


def generate(model: Path | str, *options: str | Path, text: str | None = None) -> Any:
    given = ["--model", model, "--device", "cpu", "--max-new-tokens", "9", "--dtype", "float32", *options]
    return CliRunner().invoke(app, ["generate", *map(str, given)], input=text)


def answered(model: Path, *options: str | Path, text: str | None = None) -> dict[str, Any]:
    """Return the line of JSON."""
    result = generate(model, *options, "--json", "--quiet", text=text)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def remarks(model: Path, *options: str | Path) -> list[str]:
    result = generate(model, *options)
    assert result.exit_code == 0, result.stderr
    return result.stderr.splitlines()


def error_of(*arguments: str | Path) -> str:
    """Return the message of a command that must fail by a user's mistake."""
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    return result.stderr


def plain_answer(folder: Path, token_ids: list[int]) -> str:
    """The answer of transformers alone to these tokens."""
    model, tokenizer = models.load(str(folder), torch.float32, "cpu")
    prompt = torch.tensor([token_ids])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
    return tokenizer.decode(output[0, len(token_ids) :], skip_special_tokens=True).strip()


# Answers


@pytest.mark.parametrize("cache", slow_but(["dynamic"], ["stock", "dynamic", "offloaded"]))
def test_the_answer_of_a_cache_is_that_of_plain_generate(cache: str, model: Path, report: Path):
    template = ChatTemplate(models.load(str(model), torch.float32, "cpu")[1])
    tokens = template.start(TEXT) + template.first_question("Who?", after_document=True)
    found = answered(model, "--document", report, "--question", "Who?", "--cache", cache)
    assert found["answer"] == plain_answer(model, tokens)
    assert (found["cache"], found["prompt_tokens"]) == (cache, len(tokens))


def test_a_question_without_a_document_asks_the_model_alone(model: Path):
    template = ChatTemplate(models.load(str(model), torch.float32, "cpu")[1])
    tokens = template.start() + template.first_question("What is 2+2?", after_document=False)
    found = answered(model, "--question", "What is 2+2?")
    assert found["answer"] == plain_answer(model, tokens)
    assert (found["documents"], found["read_tokens"], found["prompt_tokens"]) == ([], 0, len(tokens))


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


def test_a_prompt_file_is_used_as_it_is(model: Path, tmp_path: Path):
    (tmp_path / "prompt").write_text("One, two, three,", encoding="utf-8-sig")
    tokens = models.load(str(model), torch.float32, "cpu")[1]("One, two, three,")["input_ids"]
    found = answered(model, "--prompt-file", tmp_path / "prompt")
    assert found["answer"] == plain_answer(model, tokens)
    assert found["prompt_tokens"] == len(tokens)


def test_a_document_is_read_from_standard_input(model: Path):
    found = answered(model, "--document", "-", "--question", "Who?", text=TEXT)
    assert found["read_tokens"] == found["document_tokens"] == len(TEXT)


# Documents that do not fit


def test_a_document_leaves_just_the_room_of_question_and_answer(small: Path, report: Path):
    found = answered(small, "--document", report, "--question", "Who?")
    assert found["prompt_tokens"] == 512 - 9
    assert found["read_tokens"] < found["document_tokens"]


def test_a_document_that_is_cut_is_said_before_the_answer(small: Path, report: Path):
    asked = ["--document", report, "--question", "Who?"]
    said = generate(small, *asked, "--context", "150").stdout
    begin, end = "[Only the first 150 of the document's 1,631 tokens were read (--context 150). ", "1,481.]\n\n"
    assert said.startswith(f"{begin}The answer knows nothing of the last {end}")
    assert "tokens were read (the model's context is 512). The" in generate(small, *asked).stdout
    assert "Only the first" not in generate(small, *asked, "--json").stdout


def test_a_very_long_document_is_cut_and_its_length_estimated(small: Path, report: Path):
    report.write_text(TEXT * 100)
    said = generate(small, "--document", report, "--question", "Who?").stdout
    assert re.match(r"\[Only the first \d+ of the document's about 1\d\d,\d\d\d tokens .* last about 1\d\d,", said)


def test_of_several_documents_whole_cut_and_left_out_ones_are_named(model: Path, tmp_path: Path):
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for path in paths:
        path.write_text("Ada signed it. " * 9)
    documents = [each for path in paths for each in ("--document", path)]
    result = generate(model, *documents, "--question", "Who?", "--context", "400")
    assert f" Whole: {paths[0]}. Cut: {paths[1]} (" in result.stdout
    assert f" tokens). Left out: {paths[2]}. The answer knows nothing of the last " in result.stdout
    assert "3 documents: read 400 of " in result.stderr


# Remarks


def test_remarks_tell_model_document_and_what_the_answer_took(model: Path, report: Path):
    *_, loading, on, read, ended, took = remarks(model, "--document", report, "--question", "Who?")
    assert (loading[:7], on) == ("loading", "model: float32 on cpu")
    assert read == "document: read 1,631 of 1,631 tokens"
    assert ended == "ended at --max-new-tokens 9, which may be raised"
    pattern = r"dynamic: first token after [\d.]+ s, [\d.]+ tokens/s, KV 0.0 MiB on the device, [\d.]+ MiB on the host"
    assert re.fullmatch(pattern, took)


def test_weights_of_few_bits_are_told_at_the_end(model: Path):
    *_, took = remarks(model, "--question", "Who?", "--weights", "8")
    assert re.search(r"; weights [\d.]+ MiB in 8 bits$", took)


def test_quiet_writes_the_answer_alone_without_control_characters(model: Path):
    result = generate(model, "--question", "Who?", "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.strip()
    assert not CONTROL_CHARACTER.search(result.stdout)


# Documents of a prefix store


@pytest.mark.parametrize("form", [[], ["--bits", "4"], ["--cache", "offloaded"]])
def test_an_answer_about_a_stored_document_is_that_of_a_read_one(
    form: list[str], model: Path, report: Path, folder: Path
):
    asked = ["--document", report, *form, "--question"]
    generate(model, *asked, "Who?", "--store", folder)
    (taken,) = [line for line in remarks(model, *asked, "Where?", "--store", folder) if " are taken from " in line]
    assert re.fullmatch(rf"(1,6\d\d) of \1 tokens are taken from {re.escape(str(folder))}", taken)
    cold = answered(model, *asked, "Where?", "--store", folder.with_name("other"))["answer"]
    assert answered(model, *asked, "Where?", "--store", folder)["answer"] == cold


def test_a_document_is_only_kept_where_nothing_is_asked(model: Path, report: Path, folder: Path):
    result = generate(model, "--document", report, "--store", folder)
    assert (result.exit_code, result.stdout) == (0, "")
    (stored,) = PrefixStore(folder).prompts()
    assert f"{len(stored.token_ids):,} tokens are read and kept in {folder} in " in result.stderr
    assert (stored.title, stored.is_conversation) == ("report.txt", False)
    assert stored.details["model"] == str(model)


@pytest.mark.parametrize(
    ("stored", "given", "said"),
    [
        (["--bits", "8"], ["--bits", "4"], "with --bits 8, which takes it from there; with --bits 4 it is read anew"),
        ([], ["--bits", "2"], "without --bits, which takes it from there; with --bits 2 it is read anew"),
        (["--weights", "8"], [], "with --weights 8, which takes it from there; without --weights it is read anew"),
    ],
)
def test_a_document_in_another_form_is_said_before_it_is_read(
    stored: list[str], given: list[str], said: str, model: Path, report: Path, folder: Path
):
    generate(model, "--document", report, "--store", folder, *stored)
    asked = ["--document", report, "--question", "Who?", "--store", folder]
    lines = remarks(model, *asked, *given)
    assert lines.index(f"{folder} has report.txt {said}") < len(lines) - 2
    assert not any("it is read anew" in line for line in remarks(model, *asked, *given))


def test_what_a_folder_has_is_explained_only_if_asked(model: Path, report: Path, folder: Path):
    asked = ["--document", report, "--store", folder, "--question", "Who?"]
    generate(model, *asked)
    report.write_text(TEXT.replace("word. It", "word! It"))
    assert not any("instead of" in line for line in remarks(model, *asked))
    report.write_text(TEXT.replace("word. It", "word? It"))
    explained = remarks(model, *asked, "--explain")
    assert any(re.search(r"the first difference at token 1,\d+: '\?' instead of '[.!]'$", line) for line in explained)
    generate(model, *asked, "--bits", "4")
    assert any("stored and not used: codecs" in line for line in remarks(model, *asked, "--bits", "8", "--explain"))


def test_of_a_stored_prompt_file_only_the_last_token_is_read(model: Path, report: Path, folder: Path):
    asked = ["--prompt-file", report, "--store", folder]
    cold = answered(model, *asked)["answer"]
    assert f"1,630 of 1,630 tokens are taken from {folder}" in remarks(model, *asked)
    assert answered(model, *asked)["answer"] == cold


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Ask something, such as --question"),
        ("--document DOCUMENT", "--store keeps a document without."),
        ("--document DOCUMENT --compare", "Ask something, such as --question"),
        ("--document DOCUMENT --store FOLDER --json", "--json is of an answer: ask something with --question, or drop"),
        ("--document missing --question Who?", "Cannot read missing: No such file"),
        ("--prompt-file missing", "Cannot read missing: No such file"),
        ("--question Who? --explain", "--explain is about a prefix store: name its folder with --store, or drop it."),
        (
            "--question Who? --store FOLDER --cache stock",
            "--cache stock is transformers' own, and --store needs one of",
        ),
        ("--question Who?\udce9", "--question 'Who?\\udce9' is not UTF-8 text."),
        ("--question= --compare", "--question is empty."),
        ("--question Who? --device abacus", "--device 'abacus' is not here: this machine has cpu"),
        ("--question Who? --model ./no/such/folder", "There is no folder"),
    ],
)
def test_a_mistake_is_named_on_stderr_with_exit_code_2(arguments: str, message: str, report: Path, folder: Path):
    places = {"DOCUMENT": report, "FOLDER": folder}
    assert message in error_of(*(places.get(each, each) for each in arguments.split()))
    assert not folder.exists()


def test_a_prompt_beyond_the_model_is_refused_with_the_numbers(small: Path, report: Path):
    given = ["--model", small, "--device", "cpu"]
    assert "1,631 tokens, and the model's context is 512" in error_of(*given, "--prompt-file", report)
    asked = [*given, "--document", report, "--question", "Who?", "--max-new-tokens"]
    assert "the model's context is 512: ask for shorter answers" in error_of(*asked, "512")
    assert "3 tokens are left for the document, and the prompt takes 6 without it" in error_of(*asked, "490")


def test_a_folder_with_other_files_is_named(model: Path, report: Path):
    given = ["--model", model, "--document", report, "--store", report.parent]
    assert error_of(*given).startswith(f"error: {report.parent} ")


# Experts in host memory


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ("--experts host", None),
        ("--experts host --expert-bits 4", {"bits": 4, "only_experts": True}),
        ("--weights 8", {"bits": 8}),
    ],
)
def test_a_model_with_experts_answers_as_one_that_is_loaded_so(
    tmp_path: Path, options: str, config: dict[str, Any] | None
):
    experts = tmp_path / "experts"
    expert_model("mixtral").save_pretrained(experts)
    word_tokenizer().save_pretrained(experts)
    (tmp_path / "prompt").write_text("w3 w7 w20 w9 " * 5)
    found = answered(experts, "--prompt-file", tmp_path / "prompt", *options.split())["answer"]
    quantization = None if config is None else QuantizedWeightsConfig(**config)
    model, tokenizer = models.load(str(experts), torch.float32, "cpu", quantization_config=quantization)
    chat = Chat(model, tokenizer, settings=AnswerSettings(max_new_tokens=9))
    assert found == "".join(chat.complete((tmp_path / "prompt").read_text())).strip()


@pytest.mark.parametrize("device", [[], ["--device", "cuda"]])
def test_weights_of_few_bits_are_refused_for_a_gpu(device: list[str], model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    error = error_of("--model", model, "--question", "Who?", "--weights", "4", *device)
    assert "--weights 4 is for a model on the CPU, and this one would be on cuda" in error


def test_a_model_without_experts_is_named(model: Path):
    error = error_of("--model", model, "--device", "cpu", "--question", "Who?", "--experts", "host")
    assert f"{model} has no experts" in error


# Processes


def process(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hf_hybrid_cache.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        # Where tests run in the background of a shell, interrupts would be ignored by inheritance.
        preexec_fn=None if sys.platform == "win32" else lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_an_interrupt_ends_quietly_with_exit_code_130(model: Path, report: Path):
    asked = ["--document", report, "--question", "Who?", "--max-new-tokens", "50000"]
    running = process("generate", "--model", model, "--device", "cpu", *asked)
    assert running.stderr
    for line in running.stderr:
        if line.startswith("document"):
            break
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert (running.returncode, stderr) == (130, "")


def test_a_terminal_that_cannot_show_a_character_is_no_error(model: Path, tmp_path: Path):
    (tmp_path / "report.txt").write_text("日本の首都は東京です。" * 40)
    asked = ["--document", tmp_path / "report.txt", "--question", "Who?", "--context", "60", "--max-new-tokens", "3"]
    running = process("generate", "--model", model, "--device", "cpu", *asked, PYTHONIOENCODING="ascii")
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 0, stderr


def test_quiet_at_a_terminal_shows_the_answer_alone(model: Path, report: Path):
    terminals = pytest.importorskip("cli.terminals", reason="needs POSIX terminals", exc_type=ImportError)
    options = ["--model", model, "--device", "cpu", "--prompt-file", report, "--max-new-tokens", "5", "--quiet"]
    command = ["-m", "hf_hybrid_cache.cli", "generate", *map(str, options)]
    with terminals.Terminal(*command) as terminal:
        shown = terminal.wait_for("\n")
        assert terminal.exit_code() == 0
    answer = CliRunner().invoke(app, command[2:]).stdout
    assert terminals.CONTROL_SEQUENCE.sub("", shown + "\n") == terminals.CONTROL_SEQUENCE.sub("", answer)


def test_mistakes_in_options_and_files_are_told_before_torch_is_imported(report: Path):
    program = "import sys; from hf_hybrid_cache.cli.app import run; run()"
    for options in (["--document", "missing", "--question", "Who?"], ["--document", report, "--store", report.parent]):
        command = [sys.executable, "-X", "importtime", "-c", program, "generate", *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (2, "")
        imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
        assert not {"torch", "transformers", "numba"} & set(imported)
