"""What `make test`, or `.ci/run` too, leave to `make test-all`: further instances of what the remaining tests hold."""

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
