"""The progress that `hf-hybrid-cache batch` shows."""

import io

import pytest
from rich.console import Console

from hf_hybrid_cache.cli.batch.batch_progress import shown_progress


def said_of(num_tokens: int, chunk: int) -> list[str]:
    """Return the lines in a file while the document of the third of four questions is read."""
    file = io.StringIO()
    with shown_progress(Console(file=file, soft_wrap=True), num_questions=4, done=2) as progress:
        with progress.reading("some/report.txt", num_tokens) as advance:
            for start in range(0, num_tokens - 1, chunk):
                advance(min(chunk, num_tokens - 1 - start))
        progress.answered(3)
    return file.getvalue().splitlines()


def test_progress_when_document_is_long_then_has_line_at_each_tenth():
    *document, questions = said_of(20_000, 500)
    assert questions == "3 of 4 questions"
    assert [line.partition(" of ")[0] for line in document] == [
        f"some/report.txt: {tokens:,}" for tokens in range(2000, 20_001, 2000)
    ]
    assert all(line.endswith(" left; 2 of 4 questions") for line in document[:-1])
    assert document[-1] == "some/report.txt: 20,000 of 20,000 tokens are read; 2 of 4 questions"


@pytest.mark.parametrize(("num_tokens", "num_lines"), [(2, 0), (1000, 0), (5000, 1), (8000, 1)])
def test_a_document_of_few_thousand_tokens_is_a_line_at_most(num_tokens: int, num_lines: int):
    *document, questions = said_of(num_tokens, 100)
    assert questions == "3 of 4 questions"
    assert len(document) == num_lines


def test_a_terminal_has_bars_of_tokens_and_questions_and_no_lines():
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, force_interactive=True, width=120)
    with shown_progress(terminal, num_questions=4, done=2) as progress:
        with progress.reading("some/[b]report.txt", 20_000) as advance:
            advance(8000)
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
    assert "are read" not in file.getvalue()


def test_a_document_that_fails_is_not_said_to_be_read():
    file = io.StringIO()
    with (
        pytest.raises(MemoryError),
        shown_progress(Console(file=file, soft_wrap=True), num_questions=4, done=0) as progress,
        progress.reading("report.txt", 20_000),
    ):
        raise MemoryError
    assert file.getvalue() == ""
