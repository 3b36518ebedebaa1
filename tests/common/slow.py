"""
Marks for slow tests: further instances, which `make test` skips, and `.ci/run` runs in turns.

    @pytest.mark.slow                       # a test, or one of its cases:
    @pytest.mark.parametrize("family", slow_but(["llama"], FAMILIES))
        Only `make test-all` runs all of them. `.ci/run` runs an eighth, another one at the next commit, as it passes
        `--slow-share=K/8`, where K is the number of the commit.
    @pytest.mark.covering(2)                # a test with several parameters
        Any two values meet in a case that is quick. All other cases are slow, and `.ci/run` never runs them.
"""

import itertools
import zlib
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
        is_chosen = zlib.crc32(item.nodeid.partition("[")[0].encode()) % int(shares) == chosen
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
        while missing:
            best = max(groups, key=lambda case: len(groups[case] & missing))
            missing -= groups.pop(best)
        for case in groups:
            case.add_marker(pytest.mark.slow)
            case.add_marker(pytest.mark.combination)


def _groups(case: Any) -> set[tuple[str, ...]]:
    (count,) = case.get_closest_marker("covering").args
    values = [f"{name} {value!r}" for name, value in case.callspec.params.items()]
    return set(itertools.combinations(values, count))
