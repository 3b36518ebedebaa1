"""Measuring the processor time of other processes."""

import math
import time

import psutil


class OtherProcesses:
    """Counts, from its creation, the processor time of other processes, and of other virtual machines."""

    def __init__(self) -> None:
        self._start, self._own, self._all = time.perf_counter(), time.process_time(), _used_seconds()

    def processors(self) -> float:
        """Return the average number of processors that others kept busy; NaN where the system does not tell."""
        own, seconds = time.process_time() - self._own, time.perf_counter() - self._start
        return (_used_seconds() - self._all - own) / seconds


def load_average() -> float:
    """Return the average number of processes that computed in the last minute; NaN where the system does not tell."""
    try:
        return psutil.getloadavg()[0]
    except OSError:
        return math.nan


def _used_seconds() -> float:
    """Return the seconds that processors were in use, added up over all of them since the machine was started."""
    try:
        times = psutil.cpu_times()
    except OSError:  # a container may hide it
        return math.nan
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
