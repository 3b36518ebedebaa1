"""How much of the processors others use, while something here is timed."""

import math
import time

import psutil


class OtherProcesses:
    """Counts from when it is made; with what other virtual machines take of this one's processors."""

    def __init__(self) -> None:
        self._start, self._own, self._all = time.perf_counter(), time.process_time(), _used_seconds()

    def processors(self) -> float:
        """How many they kept busy on average; not a number where the system does not tell."""
        own, seconds = time.process_time() - self._own, time.perf_counter() - self._start
        return (_used_seconds() - self._all - own) / seconds


def _used_seconds() -> float:
    """Seconds in which a processor was in use, of all processors and since the machine was started."""
    try:
        times = psutil.cpu_times()
    except OSError:  # a container may hide it
        return math.nan
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
