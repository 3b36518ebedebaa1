"""Timing actions in turns, because the speed of a shared machine drifts."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turns(
    actions: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[str], object]
) -> dict[str, list[float]]:
    """
    Return seconds of each action in each round, in alternating order; a first round warms up and is not counted.

    Args:
        actions: what to time, by name.
        rounds: samples of each.
        before: called with the name before each action, untimed.
    """
    return samples_in_turns({name: partial(seconds_of, action) for name, action in actions.items()}, rounds, before)


def samples_in_turns(
    measures: Mapping[str, Callable[[], float]],
    rounds: int,
    before: Callable[[str], object],
    warm_up: bool = True,
) -> dict[str, list[float]]:
    """Collect samples as `in_turns` does, of functions that return their own seconds; `warm_up`: once more before."""
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(0 if warm_up else 1, rounds + 1):
        for name in list(measures)[:: 1 if turn % 2 else -1]:
            before(name)
            seconds = measures[name]()
            if turn:
                samples[name].append(seconds)
    return samples


def medians(samples: Mapping[str, Iterable[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}
