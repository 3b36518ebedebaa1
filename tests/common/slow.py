"""
Marks for slow tests, which `make test` skips, and an eighth of which `.ci/run` runs, another one at the next commit.

    @pytest.mark.slow                       # a test, or one of its cases:
    @pytest.mark.parametrize("family", slow_but(["llama"], FAMILIES))
    @pytest.mark.default("pairs")           # a test with several parameters
        Any two values meet in a case that is not slow, and all other cases are. With "values" each value is in one.
"""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest

# The mark of a combination of parameters in which no value, or no pair, is new.
_COMBINATION = pytest.mark.slow("combination").mark
_TOGETHER = {"values": 1, "pairs": 2}


def slow(*values: Any) -> Any:
    """Mark a case that `make test` skips."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark all cases of one parameter but those in `quick`."""
    cases = list(cases)
    assert all(case in cases for case in quick)
    return [case if case in quick else slow(case) for case in cases]


def part_of_slow(part: str, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """
    Choose every n-th of the slow tests but for combinations, which `make test-all` runs.

    Args:
        part: "k/n": begin with the k-th, or the one on which k falls when all take turns.
        items: what was collected.

    Returns:
        The slow tests that were chosen together with all others, and those that are left out.

    Raises:
        pytest.UsageError: it is no such text.
    """
    turn, _, parts = part.partition("/")
    if not (turn.isdecimal() and parts.isdecimal() and int(parts) > 0):
        raise pytest.UsageError(f"--slow takes two numbers, as 3/8, not {part!r}")
    slow_ones = [item for item in items if item.get_closest_marker("slow")]
    every = [item for item in slow_ones if item.get_closest_marker("slow") != _COMBINATION]
    left_out = {*slow_ones} - {*every[int(turn) % int(parts) :: int(parts)]}
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]


def mark_all_but_default(items: Iterable[pytest.Item]) -> None:
    """
    Mark combinations of parameters as slow in tests that are marked as `default("values")` or `default("pairs")`.

    What goes wrong with a value, or with a pair of values, goes wrong in one of the others.
    """
    marked = (item for item in items if item.get_closest_marker("default"))
    for _, cases in itertools.groupby(marked, key=lambda item: item.nodeid.partition("[")[0]):
        groups = {case: _groups(case) for case in cases}
        missing = set().union(*groups.values())
        while missing:
            best = max(groups, key=lambda case: len(groups[case] & missing))
            missing -= groups.pop(best)
        for case in groups:
            case.add_marker(pytest.mark.slow("combination"))


def _groups(case: Any) -> set[tuple[str, ...]]:
    (what,) = case.get_closest_marker("default").args
    values = [f"{name} {value!r}" for name, value in case.callspec.params.items()]
    return set(itertools.combinations(values, _TOGETHER[what]))
