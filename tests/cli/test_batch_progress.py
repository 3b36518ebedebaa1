"""The progress that `hf-hybrid-cache batch` shows."""

import io
from itertools import accumulate

import pytest
from rich.console import Console

from hf_hybrid_cache.cli.batch.batch_progress import shown_progress


def said_of(chunk_seconds: list[float], from_store: int = 0) -> list[str]:
    """Return the lines in a file while a document is read in chunks of 1,000 tokens, then its last token."""
    file = io.StringIO()
    times = accumulate([*[0.0] * bool(from_store), *chunk_seconds, 0.1], initial=0.0)
    notes = Console(file=file, soft_wrap=True)
    with shown_progress(notes, num_questions=4, done=2, clock=lambda: next(times)) as progress:
        with progress.reading("some/[b]report.txt", from_store + 1000 * len(chunk_seconds) + 1) as bar:
            if from_store:
                bar.take_over(from_store)
            for _ in chunk_seconds:
                bar.advance(1000)
        progress.answered(3)
    return file.getvalue().splitlines()


def test_progress_when_document_takes_long_then_has_line_a_minute():
    assert said_of([20.0] * 6) == [
        "some/[b]report.txt: 2,000 of 6,001 tokens, 50 tokens/s, 80.0 s left",
        "some/[b]report.txt: 5,000 of 6,001 tokens, 50 tokens/s, 20.0 s left",
        "some/[b]report.txt: all 6,001 tokens are read in 2 min, 50 tokens/s",
        "3 of 4 questions",
    ]


def test_progress_when_a_store_had_the_start_then_counts_from_there():
    assert said_of([20.0] * 3, from_store=7000)[:2] == [
        "some/[b]report.txt: 9,000 of 10,001 tokens, 50 tokens/s, 20.0 s left",
        "some/[b]report.txt: all 10,001 tokens are read in 60.1 s, 50 tokens/s",
    ]


def test_progress_when_document_is_read_soon_then_has_no_line_of_it():
    assert said_of([1.0] * 20) == ["3 of 4 questions"]


def test_a_terminal_has_bars_of_tokens_and_questions_and_no_lines():
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, force_interactive=True, width=120)
    with shown_progress(terminal, num_questions=4, done=2) as progress:
        with progress.reading("some/[b]report.txt", 20_000) as bar:
            bar.advance(8000)
        assert "[b]report.txt" in file.getvalue()
        assert "8,000 of 20,000 tokens" in file.getvalue()
        assert " left" in file.getvalue()
        with progress.answering(2, 50) as advance:
            for token in range(20):
                advance(token)
        progress.answered(3)
    assert "3 of 4" in file.getvalue()
    assert "2 answers" in file.getvalue()
    assert " of 100 tokens" in file.getvalue()
    assert "tokens/s" not in file.getvalue()


def test_a_document_that_fails_is_not_said_to_be_read():
    file = io.StringIO()
    with (
        pytest.raises(MemoryError),
        shown_progress(Console(file=file, soft_wrap=True), num_questions=4, done=0) as progress,
        progress.reading("report.txt", 20_000),
    ):
        raise MemoryError
    assert file.getvalue() == ""
