"""Operations run one after the other, whatever the number of threads, and each does every part once."""

from typing import NamedTuple

import numpy as np
import pytest

from hf_hybrid_cache.kernels.vector import operations, parallel
from hf_hybrid_cache.kernels.vector.compiled import jit
from hf_hybrid_cache.kernels.vector.intrinsics import call_at
from hf_hybrid_cache.kernels.vector.numbers_at import integers_at
from hf_hybrid_cache.kernels.vector.operations import Operations
from hf_hybrid_cache.kernels.vector.parallel import Team

PARTS = [1, 7, 0, 64, 0, 0, 3, 200, 1, 1, 5]


class Counted(NamedTuple):
    """Add one to the count of a part, and one to what the parts before gave."""

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
        self.counts = [np.zeros(number + 1, np.int64) for number in parts]
        self.out = [np.zeros(number + 1, np.int64) for number in parts]
        before = [(0, 0), *((out.ctypes.data, number) for out, number in zip(self.out, parts, strict=True))]
        written = [(counts.ctypes.data, out.ctypes.data) for counts, out in zip(self.counts, self.out, strict=True)]
        self.calls = np.array([Counted(*each, *to) for each, to in zip(before, written, strict=False)])
        self.operations = Operations([(count_part, call.ctypes.data) for call in self.calls])
        self.operations.set_parts(parts)


@pytest.fixture(params=[1, 2, 4, "started"])
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on so many threads, more than there are processors too, or on threads of our own."""
    threads = 2 if request.param == "started" else request.param
    pool = parallel.started_threads() if request.param == "started" else parallel.openmp()
    if pool is None and threads > 1:
        pytest.skip("no OpenMP runtime with GNU's interface is in the process")
    memory = parallel.team_memory(pool if threads > 1 else None, threads, threads, parallel.clock())
    monkeypatch.setattr(operations, "team_of_kernels", lambda: Team(memory.ctypes.data, threads))


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("parts", [[1], [500], PARTS, [3] * 30], ids=lambda parts: f"{len(parts)} operations")
def test_each_operation_sees_all_parts_of_the_one_before(parts: list[int]):
    chain = Chain(parts)
    for repeat in range(1, 201):
        chain.operations.run()
        total = 0
        for counts, out, number in zip(chain.counts, chain.out, parts, strict=True):
            assert (counts[:number] == repeat).all()
            assert (out[:number] == total + 1).all()
            total = number * (total + 1)
            out[:] = 0  # an operation that comes too early finds this


@pytest.mark.usefixtures("team")
def test_parts_that_are_set_again_count_from_the_next_run():
    chain = Chain([5, 9, 4])
    chain.operations.run()
    chain.operations.set_parts([5, 0, 2])
    chain.operations.run()
    assert [counts.tolist() for counts in chain.counts] == [[2] * 5 + [0], [1] * 9 + [0], [2, 2, 1, 1, 0]]
