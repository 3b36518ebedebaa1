"""Marks for slow tests: further instances, which `make test` skips, and `.ci/run` runs in turns."""

import hashlib
import heapq
import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Mark a case that `make test` skips."""
    return pytest.param(*values, marks=pytest.mark.slow)


def combination(*values: Any) -> Any:
    """Mark a case that `.ci/run` skips, too."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.combination])


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark all cases of one parameter but those in `quick`."""
    cases = list(cases)
    assert all(case in cases for case in quick)
    return [case if case in quick else slow(case) for case in cases]


def slow_ones_outside_of(share: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """
    Choose the slow tests to leave out: all but one of several shares, in which all cases of a function are together.

    Args:
        share: "k/n": n shares, of which the one that k falls on when they take turns.
        items: what was collected.

    Raises:
        pytest.UsageError: it is no share.
    """
    turn, _, shares = share.partition("/")
    if not (turn.isdecimal() and shares.isdecimal() and int(shares) > 0):
        raise pytest.UsageError(f"--slow-share takes two numbers, as 3/8, not {share!r}")
    chosen = int(turn) % int(shares)

    def is_left_out(item: pytest.Item) -> bool:
        function = item.nodeid.partition("[")[0].encode()
        is_chosen = hashlib.sha256(function).digest()[0] % int(shares) == chosen
        return bool(item.get_closest_marker("combination") or (item.get_closest_marker("slow") and not is_chosen))

    return [item for item in items if is_left_out(item)]


def mark_all_but_covering(items: Iterable[pytest.Item]) -> None:
    """
    Mark combinations of parameters as slow in tests that are marked as `covering(count)`.

    So many are left that any `count` values of different parameters that meet in a combination meet in one of these:
    what goes wrong with a value, or with a pair of values where it is 2, goes wrong there.
    """
    marked = (item for item in items if item.get_closest_marker("covering"))
    for _, cases in itertools.groupby(marked, key=lambda item: item.nodeid.partition("[")[0]):
        groups = {case: _groups(case) for case in cases}
        missing = set().union(*groups.values())
        # What a case brings becomes less only, so one that still brings as much as it did brings most.
        brought = [(-len(of_case), number, case) for number, (case, of_case) in enumerate(groups.items())]
        heapq.heapify(brought)
        while missing:
            before, number, case = brought[0]
            now = -len(groups[case] & missing)
            if now != before:
                heapq.heapreplace(brought, (now, number, case))
                continue
            heapq.heappop(brought)
            missing -= groups.pop(case)
        for case in groups:
            case.add_marker(pytest.mark.slow)
            case.add_marker(pytest.mark.combination)


def _groups(case: Any) -> set[tuple[str, ...]]:
    (count,) = case.get_closest_marker("covering").args
    values = [f"{name} {value!r}" for name, value in case.callspec.params.items()]
    return set(itertools.combinations(values, count))
