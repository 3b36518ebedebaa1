"""Showing the progress of a batch: bars on a terminal, and lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..console import note
from ..runs.prefill_bar import PrefillBar, progress_bars


class BatchProgress:
    """
    Shows how many questions are answered, and how many tokens of the document are read and of answers generated.

    Args:
        bars: show both on a terminal.
        notes: receives lines if it is not a terminal.
        num_questions: all questions.
        done: the questions that are answered already.
        clock: seconds.
    """

    def __init__(self, bars: Progress, notes: Console, num_questions: int, done: int, clock: Callable[[], float]):
        self._bars, self._notes, self._clock = bars, notes, clock
        self._num_questions, self.done = num_questions, done
        self._questions = bars.add_task("questions", total=num_questions, completed=done, unit="")

    def answered(self, done: int) -> None:
        """Show that so many questions are answered in all."""
        before, self.done = self.done, done
        self._bars.update(self._questions, completed=done)
        if done * 10 // self._num_questions > before * 10 // self._num_questions:
            self._say(self._questions_text)

    @contextmanager
    def reading(self, document: str, num_tokens: int) -> Iterator[PrefillBar]:
        """Show a document that is read; yields its bar."""
        # A line has room for a path.
        title = Path(document).name if self._notes.is_interactive else document
        bar = PrefillBar(self._bars, title, num_tokens, clock=self._clock)
        try:
            yield bar
            bar.finish()  # the last token is read on its own, and not reported
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
def shown_progress(
    notes: Console, num_questions: int, done: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[BatchProgress]:
    """Show the progress of a batch in which so many questions are answered already."""
    with progress_bars(notes, is_transient=False) as bars:
        yield BatchProgress(bars, notes, num_questions, done, clock)
