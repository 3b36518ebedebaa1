"""Free host memory, container limits, and the refusal that comes before any allocation."""

import itertools
import re
from pathlib import Path

import psutil
import pytest

from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.growth import grown_capacity
from hf_hybrid_cache.storage.memory.host_memory import (
    ExpectedLength,
    HostBudget,
    HostMemoryError,
    Limit,
    _cgroup_headrooms,
    available_host_bytes,
    require_host_bytes,
)


def write_group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def v2(limit: str, usage: int, reclaimable: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {reclaimable}\nactive_file 7\n"
    return {"memory.max": limit, "memory.current": str(usage), "memory.stat": stat}


def membership(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "membership"
    path.write_text(text)
    return path


def test_a_cgroup_v2_limit_leaves_what_is_not_used_or_reclaimable(tmp_path: Path):
    write_group(tmp_path / "cg/job", v2("1000", 700, reclaimable=200))
    assert _cgroup_headrooms(tmp_path / "cg", membership(tmp_path, "0::/job\n")) == [500]


def test_limits_of_parent_groups_hold_too(tmp_path: Path):
    write_group(tmp_path / "cg/pod/job", v2("max", 10))
    write_group(tmp_path / "cg/pod", v2("300", 100))
    assert _cgroup_headrooms(tmp_path / "cg", membership(tmp_path, "0::/pod/job\n")) == [200]


def test_a_container_that_sees_the_hosts_path_finds_its_group_at_the_top(tmp_path: Path):
    write_group(tmp_path / "cg", v2("300", 100))
    assert _cgroup_headrooms(tmp_path / "cg", membership(tmp_path, "0::/docker/abc\n")) == [200]


def test_a_cgroup_v1_limit_is_read_from_the_memory_controller(tmp_path: Path):
    files = {"memory.limit_in_bytes": "900", "memory.usage_in_bytes": "500", "memory.stat": "total_inactive_file 50\n"}
    write_group(tmp_path / "cg/memory/job", files)
    lines = "5:cpu,cpuacct:/job\n4:memory:/job\n"
    assert _cgroup_headrooms(tmp_path / "cg", membership(tmp_path, lines)) == [450]


def test_systems_without_control_groups_have_no_such_limit(tmp_path: Path):
    assert _cgroup_headrooms(tmp_path, tmp_path / "missing") == []


def test_available_bytes_are_at_most_what_the_system_has():
    assert 0 < available_host_bytes() <= psutil.virtual_memory().total


def test_too_much_is_refused_with_the_numbers_and_the_way_out():
    with pytest.raises(HostMemoryError, match=r"5 tokens need 1048576\.00 GiB more .* are free\. Use a shorter"):
        require_host_bytes(2**50, "5 tokens need")


class Holder:
    """A minimal object that holds tokens."""


def test_the_first_layer_asks_for_all_that_will_follow():
    budget, first = HostBudget(num_stores=1000), Holder()
    size = available_host_bytes() // 100
    with pytest.raises(HostMemoryError):
        budget.grow(first, num_entries=size, entry_bytes=1)
    HostBudget(num_stores=1).grow(first, num_entries=size, entry_bytes=1)


def test_layers_that_hold_the_tokens_already_are_not_counted_again():
    budget, holders = HostBudget(num_stores=60), [Holder() for _ in range(60)]
    size = available_host_bytes() // 100
    for holder in holders:
        budget.grow(holder, num_entries=size, entry_bytes=1)
    # 60 hundredths are spoken for. One layer more of the same is one hundredth; twice as long is 60 more.
    budget.grow(Holder(), num_entries=size, entry_bytes=1)
    with pytest.raises(HostMemoryError):
        budget.grow(holders[0], num_entries=3 * size, entry_bytes=1)


def test_max_length_when_beyond_memory_then_is_refused_at_first_tokens():
    size = available_host_bytes() // 100
    budget = HostBudget(num_stores=10, expected_length=ExpectedLength(20 * size))
    with pytest.raises(HostMemoryError, match=rf"{20 * size:,} tokens \(max_length\) need"):
        budget.grow(Holder(), num_entries=1, entry_bytes=1)


@pytest.mark.parametrize("expected_tokens", [0, 5000])
def test_a_cache_that_heads_for_the_end_of_memory_says_so_once(expected_tokens: int, monkeypatch: pytest.MonkeyPatch):
    expected_length = ExpectedLength(expected_tokens)
    budget, holders, held = HostBudget(num_stores=2, expected_length=expected_length), (Holder(), Holder()), [0, 0]
    total = 2**20

    def grow(*lengths: int) -> None:
        for num_tokens, (index, holder) in itertools.product(lengths, enumerate(holders)):
            monkeypatch.setattr(host_memory, "tightest_limit", lambda: Limit(total - sum(held), ""))
            held[index] = 100 * budget.grow(holder, num_tokens, entry_bytes=100)

    grow(100)
    # Another process takes some of it.
    total = 400_000
    said = re.escape("about token 2,000" + (" of 5,000 (max_length)" if expected_tokens else ""))
    with pytest.warns(UserWarning, match=said) as warned:
        grow(*range(400, 1900, 100))
    assert len(warned) == 1
    with pytest.raises(HostMemoryError, match="2,100 tokens need"):
        grow(2100)


def test_records_are_counted_in_tokens_of_their_blocks(monkeypatch: pytest.MonkeyPatch):
    budget = HostBudget(num_stores=1, entry_tokens=64, expected_length=ExpectedLength(64_000))
    monkeypatch.setattr(host_memory, "tightest_limit", lambda: Limit(999, ""))
    with pytest.raises(HostMemoryError, match=r"64,000 tokens \(max_length\) need"):
        budget.grow(Holder(), num_entries=1, entry_bytes=1)
    monkeypatch.setattr(host_memory, "tightest_limit", lambda: Limit(1000, ""))
    assert 64 * budget.grow(Holder(), num_entries=1, entry_bytes=1) == grown_capacity(64)


def test_what_moves_to_grow_is_asked_for_twice():
    size = available_host_bytes() // 3
    HostBudget(num_stores=1).grow(Holder(), size, entry_bytes=1, moved_bytes=size)
    with pytest.raises(HostMemoryError):
        HostBudget(num_stores=1).grow(Holder(), size, entry_bytes=1, moved_bytes=3 * size)


def test_layers_that_are_gone_are_forgotten():
    budget, size = HostBudget(num_stores=1), available_host_bytes() // 100
    for _ in range(300):
        budget.grow(Holder(), num_entries=size, entry_bytes=1)
    assert not budget._held
