"""How far `hf-hybrid-cache batch` is: bars on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..prompt_reading.progress import TimeLeft
from .console import note

# Of tokens: a document with fewer has no line of its own, and one with so many has a line for each tenth.
_ONE_LINE, _TEN_LINES = 1024, 8192


class BatchProgress:
    """
    Questions that are answered, and tokens of the document that is read.

    Args:
        bar: for both.
        notes: where lines go if it is no terminal.
        num_questions: in all.
        done: those that are answered already.
    """

    def __init__(self, bar: Progress, notes: Console, num_questions: int, done: int):
        self._bar, self._notes = bar, notes
        self._num_questions, self.done = num_questions, done
        self._questions = bar.add_task("questions", total=num_questions, completed=done, unit="")

    def answered(self, done: int) -> None:
        """So many are, in all."""
        before, self.done = self.done, done
        self._bar.update(self._questions, completed=done)
        if _passes(before, done, self._num_questions, 10):
            self._say(self._said)

    @contextmanager
    def reading(self, document: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
        """While a document is read; gives what is to be called with the number of tokens of each chunk."""
        task = self._bar.add_task(Path(document).name, total=num_tokens, unit=" tokens", end=None)
        num_lines = 10 if num_tokens >= _TEN_LINES else 1 if num_tokens >= _ONE_LINE else 0
        time_left, read, last = TimeLeft(0), 0, time.monotonic()

        def advance(chunk: int) -> None:
            nonlocal read, last
            before, read = read, read + chunk
            now = time.monotonic()
            time_left.note(read, now - last)
            last = now
            left = time_left.until(num_tokens) or 0.0
            self._bar.update(task, completed=read, end=now + left, refresh=True)
            if _passes(before, read, num_tokens, num_lines):
                rest = f", {_duration(left)} left" if read < num_tokens else ""
                self._say(f"{document}: {read:,} of {num_tokens:,} tokens are read{rest}; {self._said}")

        try:
            yield advance
            if read < num_tokens:
                advance(num_tokens - read)  # the last token is read on its own, and not told
        finally:
            self._bar.remove_task(task)

    @property
    def _said(self) -> str:
        return f"{self.done:,} of {self._num_questions:,} questions"

    def _say(self, text: str) -> None:
        if not self._notes.is_interactive:
            note(self._notes, text)


@contextmanager
def shown_progress(notes: Console, num_questions: int, done: int) -> Iterator[BatchProgress]:
    """Show it meanwhile."""
    amount = "{task.completed:,} of {task.total:,}{task.fields[unit]}"
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn(amount),
        TimeElapsedColumn(),
        _TimeLeftColumn(),
    )
    # What is written to a terminal goes above the bars, and what is written to a file stays as it is.
    redirects = sys.stdout.isatty()
    with Progress(*columns, console=notes, redirect_stdout=redirects, disable=not notes.is_interactive) as bar:
        yield BatchProgress(bar, notes, num_questions, done)


class _TimeLeftColumn(ProgressColumn):
    """By the clock for a document, whose end is known after a chunk; by the mean for questions."""

    def render(self, task: Task) -> Text:
        if "end" not in task.fields:
            seconds = task.time_remaining
        else:
            end = task.fields["end"]
            seconds = None if end is None else max(0.0, end - time.monotonic())
        return Text("" if seconds is None else f"{_duration(seconds)} left", style="progress.remaining")


def _passes(before: int, now: int, total: int, parts: int) -> bool:
    """Whether another of so many equal parts of the total is full."""
    return now * parts // total > before * parts // total


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
