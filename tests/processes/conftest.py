"""Groups of processes, each started once for all tests that use one of its size, and again after one that fails."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from .groups import Group


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lose processes at the end, when no other test needs their group."""
    items.sort(key=lambda item: item.path.name == "test_lost_process.py")


@pytest.fixture(scope="session")
def group_of() -> Iterator[Callable[[int], Group]]:
    groups: dict[int, Group] = {}

    def of(size: int) -> Group:
        if size not in groups or not groups[size].is_in_step:
            groups[size] = started.enter_context(Group(size))
        return groups[size]

    with contextlib.ExitStack() as started:
        yield of


@pytest.fixture
def group(request: pytest.FixtureRequest, group_of: Callable[[int], Group]) -> Group:
    """Two processes, or as many as the test's parameter says."""
    return group_of(getattr(request, "param", 2))
