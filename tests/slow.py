"""What `make test` leaves to `make test-all`, and `.ci/run` to turns: further instances of what the rest holds."""

import hashlib
import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def combination(*values: Any) -> Any:
    """A case that `.ci/run` leaves out, too."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.combination])


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases of one parameter, of which `make test` takes those in `quick`."""
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
    Of tests that are marked as `covering(count)`, mark combinations of parameters as slow, and as such combinations.

    So many are left that any `count` values of different parameters that meet in a combination meet in one of these:
    what goes wrong with a value, or with a pair of values where it is 2, goes wrong there.
    """
    marked = (item for item in items if item.get_closest_marker("covering"))
    for _, cases in itertools.groupby(marked, key=lambda item: item.nodeid.partition("[")[0]):
        groups = {case: _groups(case) for case in cases}
        missing = set().union(*groups.values())
        while missing:
            # The first of those that bring most.
            best = max(groups, key=lambda case: len(groups[case] & missing))
            missing -= groups.pop(best)
        for case in groups:
            case.add_marker(pytest.mark.slow)
            case.add_marker(pytest.mark.combination)


def _groups(case: Any) -> set[tuple[str, ...]]:
    (count,) = case.get_closest_marker("covering").args
    values = [f"{name} {value!r}" for name, value in case.callspec.params.items()]
    return set(itertools.combinations(values, count))
