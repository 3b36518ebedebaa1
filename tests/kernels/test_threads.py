"""The number of threads that the kernels use, how these share the work, and the independence of several callers."""

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from hf_hybrid_cache import get_num_threads, set_num_threads
from hf_hybrid_cache.attention.host_attention import KernelThread
from hf_hybrid_cache.kernels.vector import operations, parallel, threads
from hf_hybrid_cache.kernels.vector.compiled import jit
from hf_hybrid_cache.kernels.vector.intrinsics import call_at
from hf_hybrid_cache.kernels.vector.numbers_at import integers_at
from hf_hybrid_cache.kernels.vector.operations import Operations
from hf_hybrid_cache.kernels.vector.parallel import Team, split_work
from hf_hybrid_cache.kernels.vector.threads import (
    VARIABLE,
    _is_memory_spread,
    _physical_cores,
    _processors,
    _processors_at_a_time,
)
from kernels.calls import make, run

from common.programs import run_program
from common.soak import search_at_random


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


# --- how many


def test_thread_count_when_default_then_is_torchs_on_every_thread(many_cores: None, threads_of_torch: None):
    worker = KernelThread()
    for number in (1, 3, 2):
        torch.set_num_threads(number)
        assert get_num_threads() == number
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(get_num_threads).result() == number
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
def test_kernels_run_on_the_threads_of_torch_and_are_whole_before_a_signal():
    """The default is that many, too, where OpenMP binds the thread that asks to one processor."""
    most = min(_physical_cores(of_all=_is_memory_spread()), _processors_at_a_time())
    program = f"from kernels import test_threads as t; t.check_threads({most}, {len(_processors())}); t.check_signals()"
    run_program(program, OMP_PROC_BIND="true")


def check_threads(by_default: int, most: int) -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    del os.environ[VARIABLE]
    torch.set_num_threads(1024)
    assert get_num_threads() == by_default
    torch.set_num_threads(1)
    case, alone = make("bfloat16", 5000), num_threads()
    run(*case, 0.125)
    assert num_threads() == alone
    set_num_threads(most)
    run(*case, 0.125)
    assert num_threads() == alone + most - 1
    torch.set_num_threads(most)
    torch.ones(1 << 22).sum()
    assert num_threads() == alone + most - 1


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


def test_a_number_that_is_set_counts_whatever_torch_has_until_taken_back(
    many_cores: None, threads_of_torch: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, "1")
    assert get_num_threads() == 1
    set_num_threads(len(_processors()))
    torch.set_num_threads(1)
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


# --- operations, whose parts threads share

POOLS = {"torch's": parallel.openmp, "started": parallel.started_threads}


class Counted(NamedTuple):
    """Add one to the count of a part, and one to what the parts of the operation before gave."""

    before: int  # address of the numbers of the operation before
    num_before: int
    counts: int
    out: int


@jit
def count_part(part, call):
    given, total = call_at(call, Counted), 0
    for index in range(given.num_before):
        total += integers_at(given.before, given.num_before)[index]
    integers_at(given.counts, part + 1)[part] += 1
    integers_at(given.out, part + 1)[part] = total + 1


class Chain:
    """Operations of which each reads what all parts of the one before wrote."""

    def __init__(self, parts: list[int]):
        self.counts, self.out = ([np.zeros(number + 1, np.int64) for number in parts] for _ in range(2))
        before = [(0, 0), *((out.ctypes.data, number) for out, number in zip(self.out, parts, strict=True))]
        written = [(counts.ctypes.data, out.ctypes.data) for counts, out in zip(self.counts, self.out, strict=True)]
        self.calls = np.array([Counted(*each, *to) for each, to in zip(before, written, strict=False)])
        self.operations = Operations([(count_part, call.ctypes.data) for call in self.calls])
        self.operations.set_parts(parts)


# The threads that are woken, and those that take part: more than there are processors, too.
@pytest.fixture(params=[(pool, *team) for pool in POOLS for team in ((1, 1), (2, 2), (4, 4), (4, 2), (2, 4))], ids=str)
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name, woken, taking_part = request.param
    pool = POOLS[name]()
    if pool is None:
        pytest.skip("no OpenMP runtime with GNU's interface is in the process")
    memory = parallel.team_memory(pool, woken, taking_part)
    monkeypatch.setattr(operations, "team_of_kernels", lambda: Team(memory.ctypes.data, taking_part))


@pytest.mark.usefixtures("team")
@search_at_random(8)
@given(data=st.data())
def test_each_part_is_done_once_after_all_parts_of_the_operation_before(data: st.DataObject):
    """Parts that are set again count from the next run."""
    most = data.draw(st.lists(st.sampled_from([1, 500]) | st.integers(1, 9), min_size=1, max_size=20))
    chain, done = Chain(most), [np.zeros(number + 1, np.int64) for number in most]
    for _ in range(5):
        parts = [data.draw(st.sampled_from([0, 1, number])) for number in most]
        chain.operations.set_parts(parts)
        chain.operations.run()
        total = 0
        for counts, out, number, expected in zip(chain.counts, chain.out, parts, done, strict=True):
            expected[:number] += 1
            assert (counts == expected).all()
            assert (out[:number] == total + 1).all()
            total = out.sum()
            out[:] = 0  # an operation that comes too early finds this


# --- parts that fail


class Hungry(NamedTuple):
    """Count a part; one of them asks for more memory than there is."""

    which: int  # the part; -1 for none
    counts: int


@jit
def take_memory(part, call):
    given = call_at(call, Hungry)
    integers_at(given.counts, part + 1)[part] += 1
    memory = np.empty(2**60 if part == given.which else 8, np.uint8)
    memory[0] = 1


@jit
def share_memory(team, call, parts):
    split_work(team, parts, take_memory, call)


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize(("parts", "which"), [(1, 0), (200, 0), (200, 199)])
def test_call_when_a_part_finds_no_memory_then_is_an_error_after_all_parts(parts: int, which: int):
    counts = np.zeros(parts, np.int64)
    calls = np.array([Hungry(each, counts.ctypes.data) for each in (which, -1)])
    hungry, modest = (call.ctypes.data for call in calls)
    listed = [Operations([(take_memory, each), (take_memory, modest)]) for each in (hungry, modest)]
    for each in listed:
        each.set_parts([parts, parts])
    team = operations.team_of_kernels().address
    for fails, succeeds in (
        (listed[0].run, listed[1].run),
        (lambda: share_memory(team, hungry, parts), lambda: share_memory(team, modest, parts)),
    ):
        before = counts.copy()
        with pytest.raises(MemoryError, match="no memory for what a kernel works in"):
            fails()
        assert len(set((counts - before).tolist())) == 1
        succeeds()


# --- signals


def check_signals() -> None:
    """Let a signal come at random moments before, within and after a kernel, until enough have come within."""
    chain, generator = Chain([30_000]), random.Random(0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    for pool in filter(None, (of_kind() for of_kind in POOLS.values())):
        memory = parallel.team_memory(pool, 3, 3)
        operations.team_of_kernels = lambda memory=memory: Team(memory.ctypes.data, 3)
        chain.operations.run()
        start, within = time.perf_counter(), 0
        chain.operations.run()
        longest = 1.5 * (time.perf_counter() - start)
        while within < 5:
            chain.counts[0][:] = 0
            is_running = False
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-5, longest))
                is_running = True
                chain.operations.run()
                is_running = False
                time.sleep(60)
                raise AssertionError("The signal was lost.")
            except KeyboardInterrupt:
                assert (chain.counts[0][:-1] == chain.counts[0][0]).all()
                within += is_running and chain.counts[0][0] == 1


# --- threads that come late


# The signatures of `clock_gettime`, of the body of a parallel region, and of `GOMP_parallel`.
CLOCK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class LatePool:
    """A pool whose second thread gets a processor so many nanoseconds after the work is done, by a clock of its own."""

    def __init__(self) -> None:
        self.late, self.calls, self.now = 0, 0, 10**9

        @CLOCK
        def clock(_: int, written: Any) -> int:
            written[0], written[1] = divmod(self.now, 10**9)
            return 0

        @PARALLEL
        def run(body: int, data: int, threads: int, flags: int) -> None:
            self.calls += 1
            BODY(body)(data)
            self.now += self.late

        self._held = clock, run
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._held]
        self.memory = parallel.team_memory(parallel.Threads(lambda: 2, addresses[1]), 2, 2, addresses[0])

    def shares_out(self) -> bool:
        """Whether a call has asked the pool."""
        before, chain = self.calls, Chain([10])
        operations.run_operations(self.memory.ctypes.data, chain.operations._address)
        assert (chain.counts[0][:10] == 1).all()
        return self.calls > before

    def times_alone(self, late: int = 2_000_000) -> int:
        """The time that a thread works alone after a late call, in times of what was lost."""
        self.late = late
        assert self.shares_out()
        self.late = count = 0
        while not self.shares_out():
            self.now += late
            count += 1
        return count


def test_thread_when_others_come_late_then_works_alone_longer_each_time():
    pool = LatePool()
    assert [pool.times_alone() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 32, 32]
    pool.now += 10**9
    assert pool.times_alone() == 1
    pool = LatePool()
    assert [pool.times_alone(late=200_000) for _ in range(4)] == [0] * 4


# --- several callers


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
