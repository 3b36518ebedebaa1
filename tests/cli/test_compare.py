"""`generate --compare`: the same answer with every cache."""

import re
from pathlib import Path

import pytest
from click.testing import Result

from hf_hybrid_cache.chat import CACHES
from hf_hybrid_cache.cli import compare

from .commands import SHORT, lines, run

TEXT = "Ada signed the contract in the presence of two witnesses. " * 40


@pytest.fixture
def asked(model: Path, tmp_path: Path) -> list[str]:
    """Options for a question about a text to a tiny model."""
    (tmp_path / "a.txt").write_text(TEXT)
    return ["--model", str(model), "--document", str(tmp_path / "a.txt"), "--question", "Who signed?"]


def compared(*options: object) -> Result:
    return run("generate", "--compare", *SHORT, "--max-new-tokens", 2, *options)


def test_each_cache_has_a_row_and_the_tokens_of_stock(asked: list[str]):
    shown = compared(*asked).stdout
    named = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if line.split()[:1] > ["a"]}
    assert [name for name in named if name in CACHES] == list(CACHES)
    assert "  4-bit weights " in shown
    assert re.search(r"^All 4 give the same answer as stock\.$|^\d of 4 answers differ from", shown, re.MULTILINE)
    *rows, last = lines(compared(*asked, "--json", "--quiet"))
    assert [(row["cache"], row["bits"], row["weights"]) for row in rows] == [
        (name, 4 if name == "quantized" else None, None) for name in CACHES
    ]
    assert (last["cache"], last["bits"], last["weights"]) == ("quantized", 4, 4)
    assert [(row["answer"] == rows[0]["answer"], named[row["cache"]] == "yes") for row in rows[:3]] == [
        (True, True)
    ] * 3
    assert {row["read_tokens"] for row in (*rows, last)} == {len(TEXT)}


def test_without_a_document_a_sample_is_asked_about(model: Path):
    result = compared("--model", model, "--context", "150")
    assert "The document says: Assert statements are a convenient way to insert debugging" in result.stdout
    assert "document: 150 of about " in result.stderr


def test_a_long_document_is_read_in_part_unless_context_says_how_much(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compare, "MOST_TOKENS", 300)
    result = compared(*asked)
    assert f"document: 300 of {len(TEXT):,} tokens" in result.stderr
    assert f"(by each of 5 caches; --context {len(TEXT)} reads more)" in result.stdout
    assert f"document: {len(TEXT):,} of {len(TEXT):,} " in compared(*asked, "--context", len(TEXT)).stderr


def test_the_first_different_token_is_counted_from_one():
    for theirs, different in (([1, 2], None), ([1, 3], 2), ([5, 2], 1), ([1], 2), ([1, 2, 3], 3)):
        assert compare.first_difference([1, 2], theirs) == different
