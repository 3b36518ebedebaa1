"""Free host memory, container limits, and the refusal that comes before any allocation."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.growth import grown_capacity
from hf_hybrid_cache.storage.memory.host_memory import (
    HostBudget,
    HostMemoryError,
    Limit,
    _cgroup_headrooms,
    available_host_bytes,
    require_host_bytes,
)


def v2(limit: str, usage: int, reclaimable: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {reclaimable}\nactive_file 7\n"
    return {"memory.max": limit, "memory.current": str(usage), "memory.stat": stat}


V1 = {"memory.limit_in_bytes": "900", "memory.usage_in_bytes": "500", "memory.stat": "total_inactive_file 50\n"}
# Files of groups by their folders, the membership of a process, and what is left to it.
GROUPS: dict[str, tuple[dict[str, dict[str, str]], str, list[int]]] = {
    "version 2, with what is reclaimable": ({"job": v2("1000", 700, reclaimable=200)}, "0::/job\n", [500]),
    "parents": ({"pod/job": v2("max", 10), "pod": v2("300", 100)}, "0::/pod/job\n", [200]),
    "a container that sees the host's path": ({"": v2("300", 100)}, "0::/docker/abc\n", [200]),
    "version 1": ({"memory/job": V1}, "5:cpu,cpuacct:/job\n4:memory:/job\n", [450]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_limit_of_control_groups_leaves_what_is_not_used(name: str, tmp_path: Path):
    groups, lines, left = GROUPS[name]
    for folder, files in groups.items():
        (tmp_path / "cg" / folder).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (tmp_path / "cg" / folder / file).write_text(text)
    membership = tmp_path / "membership"
    membership.write_text(lines)
    assert _cgroup_headrooms(tmp_path / "cg", membership) == left
    assert _cgroup_headrooms(tmp_path / "cg", tmp_path / "missing") == []


def test_available_bytes_are_at_most_what_the_system_has():
    assert 0 < available_host_bytes() <= psutil.virtual_memory().total


def test_too_much_is_refused_with_the_numbers_and_the_way_out():
    with pytest.raises(HostMemoryError, match=r"5 tokens need 1048576\.00 GiB more .* are free\. Use a shorter"):
        require_host_bytes(2**50, "5 tokens need")


class Holder:
    """A minimal object that holds tokens."""


@pytest.fixture
def let_be_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that says how many bytes the host has for tokens of a byte."""
    return lambda free: monkeypatch.setattr(host_memory, "tightest_limit", lambda: Limit(free, ""))


def refused(budget: HostBudget, holder: Holder, num_entries: int, **options: int) -> str:
    with pytest.raises(HostMemoryError) as raised:
        budget.grow(holder, num_entries, 1, **options)
    return str(raised.value)


def test_layers_are_asked_for_together_and_not_again_for_what_they_hold(let_be_free: Callable[[int], None]):
    let_be_free(100_000)
    assert refused(HostBudget(num_stores=1000), Holder(), 1000)
    budget, holders = HostBudget(num_stores=60), [Holder() for _ in range(60)]
    for holder in holders:
        budget.grow(holder, 1000, 1)
    # Most is spoken for. One layer more of the same is little; three times as long for all is too much.
    budget.grow(Holder(), 1000, 1)
    assert refused(budget, holders[0], 3000)
    layers_that_go = HostBudget(num_stores=1)
    for _ in range(300):
        layers_that_go.grow(Holder(), 1000, 1)
    assert not layers_that_go._held


@pytest.mark.parametrize(("entry_tokens", "free"), [(1, 63_999), (64, 999)])
def test_max_length_when_beyond_memory_then_is_refused_at_first_tokens(
    entry_tokens: int, free: int, let_be_free: Callable[[int], None]
):
    """Records are counted in tokens of their blocks."""
    budget = HostBudget(1, entry_tokens, 64_000)
    let_be_free(free)
    assert "64,000 tokens (max_length) need" in refused(budget, Holder(), 1)
    let_be_free(free + 1)
    assert entry_tokens * budget.grow(Holder(), 1, 1) == grown_capacity(entry_tokens)


def test_what_moves_to_grow_is_asked_for_twice(let_be_free: Callable[[int], None]):
    let_be_free(100_000)
    HostBudget(num_stores=1).grow(Holder(), 33_000, 1, moved_bytes=33_000)
    assert refused(HostBudget(num_stores=1), Holder(), 33_000, moved_bytes=99_000)
