"""Bars on a terminal for the prompts that are read, and lines elsewhere, with the time that is left."""

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from ...durations import duration_text
from ...prompt_reading.lines import PrefillLines
from ...prompt_reading.times import PrefillTimes
from ..console import note


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
    The bar of one prompt; the lines of a long one if `bars` are not shown.

    Args:
        bars: show it.
        title: stands before it.
        num_tokens: tokens that are to be read.
        num_cached: tokens before them, which the cache holds already.
        clock: seconds.
    """

    def __init__(
        self,
        bars: Progress,
        title: str,
        num_tokens: int,
        num_cached: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._bars, self._title, self._clock = bars, title, clock
        self._task = bars.add_task(title, total=num_tokens, unit=" tokens", end=None)
        self._begin(num_cached, num_cached + num_tokens)

    def take_over(self, num_tokens: int) -> None:
        """Show that the first tokens came from a store, so that only the others are to be read."""
        self._begin(num_tokens, self._times.end)
        self._bars.update(self._task, total=self._times.end - num_tokens)

    def advance(self, num_tokens: int) -> None:
        """Show that a chunk of tokens was read."""
        self._times.reach(self._times.reached + num_tokens)
        if self._bars.disable:
            self._lines.chunk_read()
        end = time.monotonic() + (self._times.seconds_left or 0.0)
        self._bars.update(self._task, completed=self._times.reached - self._times.start, end=end, refresh=True)

    def finish(self) -> None:
        """Show that all tokens were read."""
        if left := self._times.end - self._times.reached:
            self.advance(left)

    def remove(self) -> None:
        self._bars.remove_task(self._task)

    def _begin(self, start: int, end: int) -> None:
        self._times = PrefillTimes(start, end, self._clock)
        self._lines = PrefillLines(self._times, lambda line: note(self._bars.console, f"{self._title}: {line}"))


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
