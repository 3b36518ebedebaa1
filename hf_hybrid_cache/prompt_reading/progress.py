"""The progress of reading a prompt, and the time that is left."""

import time
from collections.abc import Callable
from types import TracebackType

from tqdm.auto import tqdm

from ..durations import duration_text


class TimeLeft:
    """
    Estimates the seconds for the rest of a prompt from those of its chunks so far.

    A token takes longer the more there are before it: tokens from s to e take `a * (e - s) + b * (e² - s²) / 2`. The
    least squares of the chunks so far tell a and b; the first one warms up and does not count if there are others.

    Args:
        start: tokens that are there already.
    """

    def __init__(self, start: int):
        self._reached = start
        self._chunks: list[tuple[float, float, float]] = []

    def note(self, reached: int, seconds: float) -> None:
        """Note that a chunk has ended."""
        self._chunks.append((*_work(self._reached, reached), seconds))
        self._reached = reached

    def until(self, end: int) -> float | None:
        """Return the seconds for the remaining tokens; `None` before the first chunk."""
        if not self._chunks:
            return None
        chunks = self._chunks[1:] if len(self._chunks) > 1 else self._chunks
        tokens = sum(n for n, _, _ in chunks)
        nn = sum(n * n for n, _, _ in chunks)
        nw = sum(n * w for n, w, _ in chunks)
        ww = sum(w * w for _, w, _ in chunks)
        nt = sum(n * t for n, _, t in chunks)
        wt = sum(w * t for _, w, t in chunks)
        left, work = _work(self._reached, end)
        determinant = nn * ww - nw * nw
        if determinant > 1e-9 * nn * ww:
            of_token, of_pair = (nt * ww - wt * nw) / determinant, (nn * wt - nw * nt) / determinant
            if of_token >= 0 and of_pair >= 0:
                return of_token * left + of_pair * work
        return left * sum(t for _, _, t in chunks) / tokens


def _work(start: int, end: int) -> tuple[float, float]:
    """Return the number of tokens, and of pairs of a token and one before it."""
    return float(end - start), (float(end) ** 2 - float(start) ** 2) / 2


class PrefillProgress:
    """
    A progress bar on a terminal or in a notebook.

    Args:
        start: tokens that are there already.
        end: of all that are read.
        is_shown: on a terminal or in a notebook.
        clock: seconds.
    """

    def __init__(self, start: int, end: int, is_shown: bool, clock: Callable[[], float] = time.monotonic):
        self._end, self._clock = end, clock
        self._reached, self._left = start, TimeLeft(start)
        self._last = clock()
        self._bar = tqdm(
            total=end,
            initial=start,
            desc="prompt",
            unit=" tokens",
            disable=None if is_shown else True,
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} tokens, {rate_noinv_fmt}{postfix}",
        )

    def __enter__(self) -> "PrefillProgress":
        return self

    def reach(self, tokens: int) -> None:
        """Show that so many tokens are read."""
        now = self._clock()
        self._left.note(tokens, now - self._last)
        self._bar.update(tokens - self._reached)
        self._last, self._reached = now, tokens
        left = self._left.until(self._end)
        self._bar.set_postfix_str(f"{duration_text(left or 0.0)} left")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
