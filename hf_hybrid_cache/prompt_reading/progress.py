"""Showing how far a prompt is read and how long the rest takes, and handling Ctrl-C meanwhile."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import numpy as np
from tqdm.auto import tqdm

from ..durations import duration_text

# A line comes after the first chunk that ends so many seconds after the start, or after the line before.
_FIRST_SECONDS, _FOLLOWING_SECONDS = 30.0, 60.0


class PrefillProgress:
    """
    A progress bar on a terminal or in a notebook. Elsewhere lines on standard error: after half a minute, then every
    minute, and at the end; none for a prompt that is read within half a minute.

    Args:
        start: tokens that are there already.
        end: of all that are read.
        is_shown: whether anything is shown.
        clock: seconds.
    """

    def __init__(self, start: int, end: int, is_shown: bool, clock: Callable[[], float] = time.monotonic):
        self._end, self._clock = end, clock
        # So many tokens are there at the beginning and after each chunk, and the times of these.
        self._reached, self._times = [start], [clock()]
        self._bar = tqdm(
            total=end,
            initial=start,
            desc="prompt",
            unit=" tokens",
            disable=None if is_shown else True,
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} tokens, {rate_noinv_fmt}{postfix}",
        )
        # tqdm disables itself where it finds no terminal.
        self._has_lines = is_shown and self._bar.disable
        self._chunk_of_last_line, self._next_line = 0, self._times[0] + _FIRST_SECONDS

    def reach(self, tokens: int) -> None:
        """Show that so many tokens are read."""
        now = self._clock()
        self._bar.update(tokens - self._reached[-1])
        self._reached.append(tokens)
        self._times.append(now)
        left = duration_text(seconds_left(self._reached, self._times, self._end))
        self._bar.set_postfix_str(f"{left} left")
        if not self._has_lines:
            return
        if tokens == self._end:
            if (seconds := now - self._times[0]) >= _FIRST_SECONDS:
                _print(f"all {tokens:,} tokens are read in {duration_text(seconds)}, {self._rate_since(0)}")
        elif now >= self._next_line:
            rate = self._rate_since(self._chunk_of_last_line)
            _print(f"{tokens:,} of {self._end:,} tokens, {rate}, {left} left")
            self._chunk_of_last_line, self._next_line = len(self._times) - 1, now + _FOLLOWING_SECONDS

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def _rate_since(self, chunk: int) -> str:
        rate = (self._reached[-1] - self._reached[chunk]) / (self._times[-1] - self._times[chunk])
        return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s"


def seconds_left(reached: Sequence[int], times: Sequence[float], end: int) -> float:
    """
    Estimate the seconds for the rest of a prompt from those of its chunks so far.

    A token takes longer the more there are before it: tokens from s to e take `a * (e - s) + b * (e² - s²) / 2`. The
    least squares of the chunks so far tell a and b; the first one warms up and does not count if there are others.

    Args:
        reached: tokens that are there at the beginning, and after each chunk; at least one.
        times: of these, in seconds.
        end: tokens of the whole prompt.
    """
    tokens = np.array([*reached, end], dtype=np.float64)
    work = np.diff([tokens, tokens**2 / 2]).T  # of each chunk and of the rest: tokens, and pairs with one before
    first = 1 if len(times) > 2 else 0
    chunks, left, seconds = work[first:-1], work[-1], np.diff(times)[first:]
    if len(chunks) > 1:
        costs = np.linalg.lstsq(chunks, seconds, rcond=None)[0]
        if costs.min() >= 0:
            return float(left @ costs)
    return float(left[0] * seconds.sum() / chunks[:, 0].sum())


def _print(line: str) -> None:
    """Print a line; where nobody reads any more, the prompt is read all the same."""
    with contextlib.suppress(OSError, ValueError):
        print(f"prompt: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def finishing() -> Iterator[Callable[[], bool]]:
    """
    Let Ctrl-C end the block at the next safe moment, and raise `KeyboardInterrupt` afterwards.

    Gives what tells whether it was pressed. Pressed again it does what it did before. On threads that get no signals,
    and where something else takes them, nothing changes.
    """
    was_pressed = False
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        was_pressed = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: was_pressed
    finally:
        signal.signal(signal.SIGINT, before)
    if was_pressed:
        raise KeyboardInterrupt
