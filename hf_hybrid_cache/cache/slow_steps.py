"""Decode steps on the CPU that take several times as long as before, because other processes are busy."""

import os
import time
import warnings
from collections.abc import Callable

import torch

from ..other_processes import OtherProcesses

_WINDOW = 16
_SLOW_IN_WINDOW = 8
_TIMES = 3.0
# The fastest steps so far, whose median is what others are held against.
_BEST = 32
# Steps of less than three times this are never slow: what disturbs them is over before anybody notices.
_LEAST_SECONDS = 0.005
# A busy process takes more, even where it must share.
_BUSY_PROCESSORS = 0.25
_has_warned = False


class SlowSteps:
    """
    Warns, once in a process, of steps that are slow while other processes are busy, and tells the cure.

    OpenMP's threads wait for the slowest by spinning. One busy process besides then makes a step several times as long.

    A step counts from the first layer to the last, so what a program does between two steps does not. It is slow if it
    takes three times the median of the 32 fastest at about this length, batch and number of threads. Where half of 16
    steps are, it is counted how much other processes use, and where half of the next 16 are too, and others were busy,
    that is said.

    Args:
        watch: begins to count what others use.
        clock: in seconds.
    """

    def __init__(
        self,
        watch: Callable[[], OtherProcesses] = OtherProcesses,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._watch, self._clock = watch, clock
        self._conditions: tuple[int, int] | None = None
        self._lengths = range(0)
        self._started: float | None = None

    def begin(self, num_tokens: int, batch: int) -> None:
        """Note that a step of `batch` sequences comes to the first layer, with `num_tokens` stored."""
        conditions = batch, torch.get_num_threads()
        if self._conditions != conditions or num_tokens not in self._lengths:  # other times cannot be compared
            # A step of half as many tokens more takes half as long more at most.
            self._conditions, self._lengths = conditions, range(num_tokens, num_tokens + max(1024, num_tokens // 2) + 1)
            self._window: list[float] = []
            self._best: list[float] = []
            self._others: OtherProcesses | None = None
        elif len(self._window) == _WINDOW:
            self._judge(threads=conditions[1])
        self._started = self._clock()

    def end(self) -> None:
        """Note that it comes to the last one."""
        if self._started is not None:
            self._window.append(self._clock() - self._started)
            self._started = None

    def _judge(self, threads: int) -> None:
        global _has_warned
        window, self._window = self._window, []
        best, others = self._best, self._others
        self._best, self._others = sorted([*best, *window])[:_BEST], None
        if _has_warned or len(best) < _BEST or threads == 1:  # one thread waits for none
            return
        usual = best[_BEST // 2]
        slow = sorted(window)[_WINDOW - _SLOW_IN_WINDOW :]
        if slow[0] <= _TIMES * max(usual, _LEAST_SECONDS):
            return
        if others is None:
            self._others = self._watch()
        elif (processors := others.processors()) > _BUSY_PROCESSORS:
            _has_warned = True
            cure = f"use fewer threads than {threads} (OMP_NUM_THREADS or torch.set_num_threads; attention follows)"
            if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
                cure = f"set GOMP_SPINCOUNT=0 in the environment before Python starts, or {cure}"
            now = slow[_SLOW_IN_WINDOW // 2]
            warnings.warn(
                f"Decode steps take {1e3 * now:,.0f} ms, {now / usual:.1f} times as long as before, while other "
                f"processes keep {processors:.1f} processors busy. Every step waits for its slowest thread: {cure}.",
                stacklevel=2,
            )
