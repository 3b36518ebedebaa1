"""Showing the progress of a batch: bars on a terminal, and lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ...durations import duration_text
from ..console import note
from ..runs.prefill_bar import PrefillBar, progress_bars

# Without a terminal, a document of at least this many tokens has one line, or a line for each tenth.
_ONE_LINE, _TEN_LINES = 1024, 8192


class BatchProgress:
    """
    Shows how many questions are answered, and how many tokens of the document are read and of answers generated.

    Args:
        bars: show both on a terminal.
        notes: receives lines if it is not a terminal.
        num_questions: all questions.
        done: the questions that are answered already.
    """

    def __init__(self, bars: Progress, notes: Console, num_questions: int, done: int):
        self._bars, self._notes = bars, notes
        self._num_questions, self.done = num_questions, done
        self._questions = bars.add_task("questions", total=num_questions, completed=done, unit="")

    def answered(self, done: int) -> None:
        """Show that so many questions are answered in all."""
        before, self.done = self.done, done
        self._bars.update(self._questions, completed=done)
        if _passes(before, done, self._num_questions, 10):
            self._say(self._questions_text)

    @contextmanager
    def reading(self, document: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
        """Show a document that is read; yields the function to call with the number of tokens of each chunk."""
        bar = PrefillBar(self._bars, Path(document).name, num_tokens)
        num_lines = 10 if num_tokens >= _TEN_LINES else 1 if num_tokens >= _ONE_LINE else 0

        def advance(chunk: int) -> None:
            before = bar.num_read
            bar.advance(chunk)
            if _passes(before, bar.num_read, num_tokens, num_lines):
                rest = f", {duration_text(bar.seconds_left or 0.0)} left" if bar.num_read < num_tokens else ""
                read = f"{bar.num_read:,} of {num_tokens:,} tokens are read"
                self._say(f"{document}: {read}{rest}; {self._questions_text}")

        try:
            yield advance
            if bar.num_read < num_tokens:
                advance(num_tokens - bar.num_read)  # the last token is read on its own, and not reported
        finally:
            bar.remove()

    @contextmanager
    def answering(self, num_answers: int, max_new_tokens: int) -> Iterator[Callable[[int], None]]:
        """Show the tokens of answers that are generated together; yields the function to call after each step."""
        title = "answer" if num_answers == 1 else f"{num_answers} answers"
        bar = self._bars.add_task(title, total=num_answers * max_new_tokens, unit=" tokens")
        try:
            yield lambda token: self._bars.advance(bar, num_answers)
        finally:
            self._bars.remove_task(bar)

    @property
    def _questions_text(self) -> str:
        return f"{self.done:,} of {self._num_questions:,} questions"

    def _say(self, text: str) -> None:
        if not self._notes.is_interactive:
            note(self._notes, text)


@contextmanager
def shown_progress(notes: Console, num_questions: int, done: int) -> Iterator[BatchProgress]:
    """Show the progress of a batch in which so many questions are answered already."""
    with progress_bars(notes, is_transient=False) as bars:
        yield BatchProgress(bars, notes, num_questions, done)


def _passes(before: int, now: int, total: int, parts: int) -> bool:
    """Whether another of so many equal parts of the total is complete."""
    return now * parts // total > before * parts // total
