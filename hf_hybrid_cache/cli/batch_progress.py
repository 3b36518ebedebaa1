"""The progress of a batch: a bar with the time that is left at a terminal, and a line at each tenth elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..scalars import duration_text
from .console import note, without_controls


class BatchProgress:
    """
    Shows how many questions are answered, and the time that is left if documents and answers go on like those so far.

    Args:
        notes: shows the bar from the first document on, or receives the lines.
        num_questions: all questions.
        done: those that are answered already.

    Attributes:
        done: questions that have an answer, or an error.
        documents_left: documents that are not read yet, the one at hand among them.
    """

    def __init__(self, notes: Console, num_questions: int, done: int):
        self.done, self.documents_left = done, 0
        self._notes, self._num_questions, self._last = notes, num_questions, time.monotonic()
        self._document_tokens, self._read_part = 0, 0.0  # of the document at hand
        self._num_read, self._reading_seconds = 0, 0.0
        self._num_answers, self._answering_seconds = 0, 0.0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,} of {task.total:,} questions"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=notes,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays as it is
            disable=not notes.is_interactive,
        )
        self._task = self._bar.add_task("", total=num_questions, completed=done, left="")

    @contextmanager
    def reading(self, document: str, num_tokens: int) -> Iterator[None]:
        """Show that a document is read meanwhile."""
        self._last, self._document_tokens = time.monotonic(), num_tokens
        self._bar.start()
        self._bar.update(self._task, description=without_controls(Path(document).name), refresh=True)
        try:
            yield
            self._num_read += 1
        finally:
            self.documents_left -= 1
            self._document_tokens, self._read_part = 0, 0.0

    def advance(self, num_tokens: int) -> None:
        """Note that tokens were read; those of questions are a part of their answers."""
        if self._document_tokens:
            self._reading_seconds += self._seconds()
            self._read_part += num_tokens / self._document_tokens
            self._show()

    def answered(self, is_error: bool) -> None:
        """Note that a question has an answer, or an error, which took no time."""
        self.done += 1
        if not is_error:
            self._answering_seconds += self._seconds()
            self._num_answers += 1
        self._show()
        if self._bar.disable and self.done * 10 // self._num_questions > (self.done - 1) * 10 // self._num_questions:
            note(self._notes, f"{self.done:,} of {self._num_questions:,} questions")

    def close(self) -> None:
        """End the bar."""
        self._bar.update(self._task, description="")
        self._bar.stop()

    def _seconds(self) -> float:
        """The seconds since the last call."""
        before, self._last = self._last, time.monotonic()
        return self._last - before

    def _show(self) -> None:
        of_document = self._reading_seconds / (self._num_read + self._read_part or 1.0)
        of_answer = self._answering_seconds / (self._num_answers or 1)
        left = of_document * (self.documents_left - self._read_part) + of_answer * (self._num_questions - self.done)
        text = f"{'' if self._num_answers else 'more than '}{duration_text(left)} left"
        self._bar.update(self._task, completed=self.done, left=text if left > 0 else "", refresh=True)
