"""The number of threads that the kernels use, and the independence of several callers."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
import torch

from hf_hybrid_cache import get_num_threads, set_num_threads
from hf_hybrid_cache.attention.host_attention import KernelThread
from hf_hybrid_cache.kernels.vector import parallel, threads
from hf_hybrid_cache.kernels.vector.threads import (
    VARIABLE,
    _is_memory_spread,
    _physical_cores,
    _processors,
    _processors_at_a_time,
)
from kernels.calls import make, run

from common.programs import run_program


@pytest.fixture(autouse=True)
def default_before_and_afterwards():
    set_num_threads(None)
    yield
    set_num_threads(None)


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has more cores than torch has threads, with default settings."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(threads, "_physical_cores", lambda of_all: 64)
    monkeypatch.setattr(threads, "_processors_at_a_time", lambda: sys.maxsize)


@pytest.fixture
def threads_of_torch() -> Iterator[None]:
    """Restore the number of torch's threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_thread_count_when_default_then_is_torchs(many_cores: None, threads_of_torch: None):
    for number in (1, 3, 2):
        torch.set_num_threads(number)
        assert get_num_threads() == number
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(get_num_threads).result() == number


def test_the_default_is_at_most_the_cores_of_a_socket(monkeypatch: pytest.MonkeyPatch, threads_of_torch: None):
    monkeypatch.delenv(VARIABLE, raising=False)
    torch.set_num_threads(1024)
    assert get_num_threads() == min(_physical_cores(of_all=_is_memory_spread()), _processors_at_a_time())


def test_a_number_that_is_asked_for_counts_whatever_torch_has(many_cores: None, threads_of_torch: None):
    most = len(_processors())
    set_num_threads(most)
    torch.set_num_threads(1)
    assert get_num_threads() == most


def test_worker_thread_when_it_attends_then_has_callers_thread_count(many_cores: None, threads_of_torch: None):
    worker = KernelThread()
    for number in (2, 1, 3):
        torch.set_num_threads(number)
        assert worker.submit(lambda: (get_num_threads(), torch.get_num_threads())).result() == (number, number)
        assert torch.get_num_threads() == number


@pytest.mark.parametrize(
    ("lines", "files", "most"),
    [
        ("0::/pod/job", {"pod/job/cpu.max": "150000 100000", "pod/cpu.max": "max 100000"}, 2),
        ("0::/pod/job", {"pod/job/cpu.max": "max 100000", "pod/cpu.max": "20000 100000"}, 1),
        ("0::/of/the/host", {"cpu.max": "400000 100000"}, 4),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "100000"}, 3),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, sys.maxsize),
        ("4:memory:/job", {}, sys.maxsize),
    ],
)
def test_a_quota_of_a_container_counts_as_so_many_processors(
    lines: str, files: dict[str, str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    membership = tmp_path / "cgroup"
    membership.write_text(lines + "\n")
    assert _processors_at_a_time(tmp_path / "groups", membership) == most


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads of a process as Linux shows them")
def test_kernel_when_torch_has_one_thread_then_starts_no_other():
    program = """
import os
import torch
from kernels import test_threads

def num_threads():
    return len(os.listdir("/proc/self/task"))

del os.environ[test_threads.VARIABLE]
case, alone = test_threads.make("bfloat16", 5000), num_threads()
test_threads.run(*case, 0.125)
assert num_threads() == alone
most = len(test_threads._processors())
test_threads.set_num_threads(most)
test_threads.run(*case, 0.125)
assert num_threads() == alone + most - 1
"""
    run_program(program, OMP_NUM_THREADS="1")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="asks which processors the process may use")
def test_cores_when_memory_is_interleaved_then_sum_over_sockets(tmp_path: Path):
    allowed = sorted(os.sched_getaffinity(0))
    for processor in allowed:
        topology = tmp_path / f"cpu{processor}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text("7\n")
    assert _physical_cores(of_all=False, processors=tmp_path) == 1
    assert _physical_cores(of_all=True, processors=tmp_path) == 1
    for processor in allowed:
        (tmp_path / f"cpu{processor}" / "topology" / "physical_package_id").write_text(f"{processor}\n")
    assert _physical_cores(of_all=False, processors=tmp_path) == 1
    assert _physical_cores(of_all=True, processors=tmp_path) == len(allowed)
    assert _physical_cores(of_all=False, processors=tmp_path / "nothing") == len(allowed)


def test_threads_that_openmp_binds_to_processors_are_as_many():
    program = "import os; del os.environ[{!r}]; import torch; from hf_hybrid_cache import get_num_threads; "
    program += "torch.set_num_threads(1024); assert get_num_threads() == {}"
    most = min(_physical_cores(of_all=_is_memory_spread()), _processors_at_a_time())
    run_program(program.format(VARIABLE, most), OMP_PROC_BIND="true")


def test_a_number_that_is_set_is_used_and_taken_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert get_num_threads() == 1
    set_num_threads(len(_processors()))
    assert get_num_threads() == len(_processors())
    set_num_threads(None)
    assert get_num_threads() == 1


@pytest.mark.parametrize("number", [0, -1, 10_000, 1.5, "many"])
def test_thread_count_when_not_possible_then_is_refused(number: object, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=f"num_threads must be an integer from 1 to .* got {number!r}"):
        set_num_threads(number)  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, str(number))
    with pytest.raises(ValueError, match=VARIABLE):
        get_num_threads()


def test_callers_on_several_threads_get_their_own_results():
    cases = [make("bfloat16", 3000 + seed, num_kv_heads=2, group=4, seed=seed) for seed in range(8)]
    alone = [run(*case, 0.125)[0] for case in cases]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda case: run(*case, 0.125)[0], cases * 3))
    for index, result in enumerate(together):
        assert np.array_equal(result, alone[index % 8])


def test_without_openmp_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch):
    case = make("bfloat16", 5000, num_kv_heads=3, group=4)
    expected = run(*case, 0.125)[0]
    monkeypatch.setattr(parallel, "openmp", lambda: None)
    parallel._team_of.cache_clear()
    try:
        assert np.array_equal(run(*case, 0.125)[0], expected)
        test_callers_on_several_threads_get_their_own_results()
    finally:
        parallel._team_of.cache_clear()


@numba.njit
def _count_once(part, seen):
    # Slow enough for every thread to get some.
    for _ in range(10_000):
        seen.counts[part] += 1
    seen.counts[part] -= 9_999


class _Seen(NamedTuple):
    counts: np.ndarray


@numba.njit
def _share_out(team, parts, seen):
    parallel.split_work(team, parts, _count_once, seen)


@pytest.mark.parametrize("pool", [parallel.openmp, parallel.started_threads])
@pytest.mark.parametrize(("team", "threads"), [(1, 1), (2, 2), (4, 2), (2, 4)])
def test_every_part_is_done_once_whatever_the_number_of_threads(
    pool: Callable[[], parallel.Threads | None], team: int, threads: int
):
    pool_threads = pool()
    if pool_threads is None:
        pytest.skip("no OpenMP runtime with GNU's interface is in the process")
    for parts in (0, 1, 3, 1000):
        seen = _Seen(np.zeros(parts, np.int64))
        memory = parallel.team_memory(pool_threads, team, threads, parallel.clock())
        _share_out(memory.ctypes.data, parts, seen)
        assert (seen.counts == 1).all()


class _LatePool:
    """A pool whose second thread gets a processor so many nanoseconds after the work is done, by a clock of its own."""

    def __init__(self) -> None:
        self.late, self.calls, self.now = 0, 0, 10**9

        @parallel._CLOCK
        def clock(_: int, written: Any) -> int:
            written[0], written[1] = divmod(self.now, 10**9)
            return 0

        @parallel._PARALLEL
        def run(body: int, data: int, threads: int, flags: int) -> None:
            self.calls += 1
            parallel._BODY(body)(data)
            self.now += self.late

        self._held = clock, run
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._held]
        self.memory = parallel.team_memory(parallel.Threads(addresses[1], lambda: 2), 2, 2, addresses[0])

    def shares_out(self) -> bool:
        """Whether a call has asked the pool."""
        before, seen = self.calls, _Seen(np.zeros(10, np.int64))
        _share_out(self.memory.ctypes.data, 10, seen)
        assert (seen.counts == 1).all()
        return self.calls > before


def test_thread_when_others_come_late_then_works_alone_longer_each_time():
    pool, late = _LatePool(), 2_000_000

    def times_alone() -> int:
        """The time that a thread works alone after a late call, in times of what was lost."""
        pool.late = late
        assert pool.shares_out()
        pool.late = count = 0
        while not pool.shares_out():
            pool.now += late
            count += 1
        return count

    assert [times_alone() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 32, 32]
    pool.now += 10**9
    assert times_alone() == 1


def test_threads_when_little_late_then_go_on_together():
    pool = _LatePool()
    pool.late = 200_000
    assert all(pool.shares_out() for _ in range(4))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads of a process as Linux shows them")
def test_the_kernels_run_on_the_threads_of_torch():
    program = """
import os
import torch
from kernels import test_threads

def num_threads():
    return len(os.listdir("/proc/self/task"))

if len(test_threads._processors()) > 1:
    alone = num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 22).sum()
    with_torch = num_threads()
    test_threads.set_num_threads(2)
    test_threads.run(*test_threads.make("bfloat16", 5000), 0.125)
    assert alone < with_torch == num_threads(), (alone, with_torch, num_threads())
"""
    run_program(program)
