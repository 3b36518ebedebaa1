"""The times of a prompt that is read: how far it is, and how long the rest takes."""

import time
from collections.abc import Callable


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


class PrefillTimes:
    """
    The tokens of a prompt that are read, and the time that the rest takes.

    Args:
        start: tokens that are there already.
        end: of all that are read.
        clock: seconds.

    Attributes:
        reached: tokens that are there.
        now: the clock's seconds when they were.
    """

    def __init__(self, start: int, end: int, clock: Callable[[], float] = time.monotonic):
        self.start, self.end, self.reached = start, end, start
        self._clock, self._left = clock, TimeLeft(start)
        self.begun = self.now = clock()

    def reach(self, tokens: int) -> None:
        """Note that so many tokens are read."""
        before, self.now = self.now, self._clock()
        self._left.note(tokens, self.now - before)
        self.reached = tokens

    @property
    def seconds_left(self) -> float | None:
        """An estimate for the other tokens; `None` before the first chunk."""
        return self._left.until(self.end)
