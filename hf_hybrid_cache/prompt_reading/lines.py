"""Lines that say how far a prompt is read, where no bar can be shown."""

from collections.abc import Callable

from ..durations import duration_text
from .times import PrefillTimes

# A line comes after the first chunk that ends so many seconds after the start, or after the line before.
_FIRST_SECONDS, _FOLLOWING_SECONDS = 30.0, 60.0


class PrefillLines:
    """
    Says how far a long prompt is read: after half a minute, then every minute, and at its end.

    A prompt that is read within half a minute has no line.

    Args:
        times: of the prompt; each line has the tokens a second since the line before.
        say: prints a line.
    """

    def __init__(self, times: PrefillTimes, say: Callable[[str], None]):
        self._times, self._say = times, say
        self._reached, self._last, self._due = times.reached, times.now, times.now + _FIRST_SECONDS

    def chunk_read(self) -> None:
        """Say how far the prompt is read, if a line is due."""
        times = self._times
        if times.reached < times.end:
            if times.now >= self._due:
                rate = _rate_text(times.reached - self._reached, times.now - self._last)
                left = duration_text(times.seconds_left or 0.0)
                self._say(f"{times.reached:,} of {times.end:,} tokens, {rate}, {left} left")
                self._reached, self._last, self._due = times.reached, times.now, times.now + _FOLLOWING_SECONDS
        elif (seconds := times.now - times.begun) >= _FIRST_SECONDS:
            rate = _rate_text(times.end - times.start, seconds)
            self._say(f"all {times.end:,} tokens are read in {duration_text(seconds)}, {rate}")


def _rate_text(tokens: int, seconds: float) -> str:
    rate = tokens / seconds
    return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s"
