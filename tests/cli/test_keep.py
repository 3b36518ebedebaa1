"""Prompts that commands keep in a folder, and take from it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.cli.runs.answer_options import AnswerOptions
from hf_hybrid_cache.cli.runs.timed_run import timed_generate
from hf_hybrid_cache.prefix_store import PrefixStore

from models.tiny_models import random_prompt, tiny_model

TEXT = "Nobody said a word. " * 80 + "It was signed by Ada in London."


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


def generate(model: Path, *options: str | Path) -> Any:
    given = ["--model", model, "--device", "cpu", "--max-new-tokens", "9", *options]
    return CliRunner().invoke(app, ["generate", *map(str, given)])


def said(model: Path, *options: str | Path) -> tuple[str, str]:
    """Return the answer, and the remark on what came from the folder."""
    result = generate(model, *options)
    assert result.exit_code == 0, result.stderr
    (remark,) = [line for line in result.stderr.splitlines() if " tokens from " in line] or [""]
    return result.stdout, remark


@pytest.mark.parametrize("form", [[], ["--bits", "4"], ["--cache", "offloaded"]])
def test_answer_when_document_is_kept_then_is_that_of_a_read_one(
    form: list[str], model: Path, report: Path, folder: Path
):
    def asked(question: str, *where: str | Path) -> tuple[str, str]:
        return said(model, "--document", report, "--question", question, *form, *where)

    asked("Who?", "--keep", folder)
    hit, remark = asked("Where?", "--keep", folder)
    cold, nothing = asked("Where?", "--keep", folder / "other")
    assert hit == cold
    assert f" tokens from {folder}" in remark
    assert nothing.startswith("0 of ")
    assert int(remark.partition(" ")[0].replace(",", "")) > len(TEXT)
    if form != ["--bits", "4"]:
        assert hit == asked("Where?")[0]


def test_answer_when_document_was_altered_then_difference_is_text(model: Path, report: Path, folder: Path):
    options = ["--document", report, "--question", "Who?"]
    said(model, *options, "--keep", folder)
    report.write_text(TEXT.replace("word. It", "word! It"))
    answer, remark = said(model, *options, "--keep", folder)
    assert "the first difference at token 1," in remark
    assert remark.endswith(": '!' instead of '.'")
    assert int(remark.partition(" ")[0].replace(",", "")) > 1000
    assert answer == said(model, *options)[0]


def test_document_when_nothing_is_asked_then_is_kept_alone(model: Path, report: Path, folder: Path):
    result = generate(model, "--document", report, "--keep", folder)
    assert (result.exit_code, result.stdout) == (0, "")
    (kept,) = PrefixStore(folder).kept_prompts()
    assert f"document: {len(kept.token_ids):,} tokens are kept in {folder}" in result.stderr
    assert (kept.title, kept.is_conversation) == ("report.txt", False)
    _, remark = said(model, "--document", report, "--question", "Who?", "--keep", folder)
    assert remark.startswith(f"{len(kept.token_ids):,} of ")


def test_prompt_file_when_kept_then_only_its_last_tokens_are_read(model: Path, report: Path, folder: Path):
    cold, _ = said(model, "--prompt-file", report, "--keep", folder, "--json")
    hit, remark = said(model, "--prompt-file", report, "--keep", folder, "--json")
    assert json.loads(hit)["answer"] == json.loads(cold)["answer"]
    assert remark.startswith(f"{len(TEXT) - 1:,} of {len(TEXT):,} tokens from ")


def test_title_when_a_question_is_asked_then_names_it(model: Path, report: Path, folder: Path):
    (report.parent / "other.txt").write_text("And no more.")
    said(model, "--document", report, "--document", report.parent / "other.txt", "--question", "Who?", "--keep", folder)
    assert [each.title for each in PrefixStore(folder).kept_prompts()] == ["report.txt and 1 more: Who?"]


def test_prefill_time_when_a_store_fills_the_cache_then_has_its_time():
    model, prompt = tiny_model("llama"), random_prompt(1, 30)
    cache = DynamicHybridCache(model.config)
    run = timed_generate(model, prompt, cache, AnswerOptions(2), fill=lambda: time.sleep(0.05))
    assert run.prefill_seconds > 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--save-cache", "a"], "--keep keeps the document by itself: drop --save-cache and --load-cache, or --keep."),
        (["--load-cache", "a", "--question", "Who?"], "--keep keeps the document by itself"),
        (["--compare"], "--keep is for one cache, --compare for all"),
        (["--cache", "stock"], "--cache stock is transformers' own, which cannot be saved"),
        (["--prefill-chunk-size", "64"], "have 2,048 tokens, so that every prompt gives the same states: drop"),
        (["--document", "report.txt", "--json"], "--json is of an answer"),
    ],
)
def test_options_when_they_do_not_go_with_keep_then_error(options: list[str], message: str, folder: Path):
    result = CliRunner().invoke(app, ["generate", "--keep", str(folder), *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not folder.exists()


def test_folder_when_it_has_other_files_then_error_names_it(model: Path, report: Path):
    result = generate(model, "--document", report, "--keep", report.parent)
    assert result.exit_code == 2
    assert f"error: {report.parent} " in result.stderr
