"""Bars on a terminal for the prompts that are read, with the time that is left."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from ...durations import duration_text
from ...prompt_reading.progress import TimeLeft


def progress_bars(notes: Console, *, is_transient: bool) -> Progress:
    """
    Bars that show amounts, the time that has passed and the time that is left.

    Args:
        notes: shows the bars, if it is a terminal.
        is_transient: whether the bars go away at the end.
    """
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.total:,}{task.fields[unit]}"),
        _TimeColumn(),
        console=notes,
        transient=is_transient,
        # Text for a terminal goes above the bars; text for a file stays as it is.
        redirect_stdout=sys.stdout.isatty(),
        disable=not notes.is_interactive,
    )


class PrefillBar:
    """
    The bar of one prompt.

    Args:
        bars: show it.
        title: stands before it.
        num_tokens: tokens that are to be read.
        num_cached: tokens before them, which the cache holds already.

    Attributes:
        num_read: tokens that were read.
        seconds_left: an estimate for the other tokens; `None` before the first chunk.
    """

    def __init__(self, bars: Progress, title: str, num_tokens: int, num_cached: int = 0):
        self.num_read = 0
        self.seconds_left: float | None = None
        self._bars, self._num_tokens, self._num_cached = bars, num_tokens, num_cached
        self._time_left, self._last = TimeLeft(num_cached), time.monotonic()
        self._task = bars.add_task(title, total=num_tokens, unit=" tokens", end=None)

    def advance(self, num_tokens: int) -> None:
        """Show that a chunk of tokens was read."""
        now = time.monotonic()
        self.num_read += num_tokens
        self._time_left.note(self._num_cached + self.num_read, now - self._last)
        self._last = now
        self.seconds_left = self._time_left.until(self._num_cached + self._num_tokens)
        end = now + (self.seconds_left or 0.0)
        self._bars.update(self._task, completed=self.num_read, end=end, refresh=True)

    def remove(self) -> None:
        self._bars.remove_task(self._task)


class _TimeColumn(ProgressColumn):
    """The time that has passed and the time that is left, which a prompt estimates by its chunks."""

    def render(self, task: Task) -> Text:
        seconds = task.time_remaining
        if "end" in task.fields:
            end = task.fields["end"]
            seconds = None if end is None else max(0.0, end - time.monotonic())
        elapsed = task.finished_time if task.finished else task.elapsed
        texts = ["" if elapsed is None else duration_text(elapsed)]
        texts += [] if seconds is None else [f"{duration_text(seconds)} left"]
        return Text(", ".join(texts), style="progress.remaining")
