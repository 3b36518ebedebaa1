"""Showing how far a prompt is read: a bar on a terminal and in a notebook, and lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType

from tqdm.auto import tqdm

from ..durations import duration_text
from .lines import PrefillLines
from .times import PrefillTimes


class PrefillProgress:
    """
    A progress bar on a terminal or in a notebook; where standard error is neither, lines of a long prompt.

    Args:
        start: tokens that are there already.
        end: of all that are read.
        is_shown: whether anything is shown.
        clock: seconds.
    """

    def __init__(self, start: int, end: int, is_shown: bool, clock: Callable[[], float] = time.monotonic):
        self._times = PrefillTimes(start, end, clock)
        self._bar = tqdm(
            total=end,
            initial=start,
            desc="prompt",
            unit=" tokens",
            disable=None if is_shown else True,
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} tokens, {rate_noinv_fmt}{postfix}",
        )
        # tqdm disables itself where it finds no terminal.
        self._lines = PrefillLines(self._times, _print) if is_shown and self._bar.disable else None

    def __enter__(self) -> "PrefillProgress":
        return self

    def reach(self, tokens: int) -> None:
        """Show that so many tokens are read."""
        self._bar.update(tokens - self._times.reached)
        self._times.reach(tokens)
        self._bar.set_postfix_str(f"{duration_text(self._times.seconds_left or 0.0)} left")
        if self._lines is not None:
            self._lines.chunk_read()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()


def _print(line: str) -> None:
    """Print a line; where nobody reads any more, the prompt is read all the same."""
    with contextlib.suppress(OSError, ValueError):
        print(f"prompt: {line}", file=sys.stderr, flush=True)
