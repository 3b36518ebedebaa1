"""Memory of growing buffers. That they hold what was written in any order tells `test_stores.py`, of all kinds."""

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from hf_hybrid_cache.storage.memory.buffer_memory import DeviceMemory, HostMemory
from hf_hybrid_cache.storage.memory.growth import GRANULE, grown_capacity
from hf_hybrid_cache.storage.runs.block_buffer import BlockBuffer
from hf_hybrid_cache.storage.runs.token_buffer import TokenBuffer

from common.programs import wait_for_compilation

SHAPE = (2, 3, 8)
LENGTHS = [1, GRANULE - 1, GRANULE, GRANULE + 1, 255, 256, 257, 1000, 4095, 4097, 9000]


def random_states(num_tokens: int, shape: tuple[int, int, int] = SHAPE) -> torch.Tensor:
    """`[batch, num_kv_heads, num_tokens, head_dim]`."""
    return torch.randn(shape[0], shape[1], num_tokens, shape[2], generator=torch.Generator().manual_seed(0))


def filled(buffer: TokenBuffer, states: torch.Tensor) -> TokenBuffer:
    buffer.ensure(states.shape[2], keep=0)
    buffer.write(0, states)
    return buffer


KINDS: dict[str, Callable[[], TokenBuffer]] = {
    "host": lambda: TokenBuffer(SHAPE, torch.float32, HostMemory(), token_major=True),
    "device": lambda: TokenBuffer(SHAPE, torch.float32, DeviceMemory(torch.device("cpu"))),
    "blocks": lambda: BlockBuffer(SHAPE, torch.float32, HostMemory(), transposed=True),
}


@pytest.mark.parametrize("indices", [[1, 0], [0, 0], [0, 1, 1, 0]])
@pytest.mark.parametrize("kind", KINDS)
def test_selected_sequences_when_moved_in_pieces_are_those_of_index_select(
    kind: str, indices: list[int], monkeypatch: pytest.MonkeyPatch
):
    # A few tokens at a time.
    monkeypatch.setattr("hf_hybrid_cache.storage.runs.token_buffer._PIECE_BYTES", 7 * 2 * 3 * 8 * 4)
    buffer = KINDS[kind]()
    buffer.ensure(1, keep=0)
    states = random_states(buffer.capacity)
    filled(buffer, states).write(buffer.capacity, states[:, :, :0])  # nothing, where there is no room
    selected = buffer.select(torch.tensor(indices), buffer.capacity)
    assert torch.equal(selected.read_range(0, buffer.capacity), states[indices])


def _huge_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.fixture
def huge_pages() -> None:
    """Skip the test if the system gives no huge pages to a plain mapping that asks for them."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("the system has no transparent huge pages, or has them switched off")
    before = _huge_kib()
    with mmap.mmap(-1, 18 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(pages, np.uint8).fill(1)
        if _huge_kib() - before < 12 * 1024:
            pytest.skip("the system has no huge pages to give just now")
    wait_for_compilation()


@pytest.mark.usefixtures("huge_pages")
@pytest.mark.parametrize("step", [16_384, 100])
def test_full_huge_pages_are_used_and_no_memory_beyond_what_is_written(step: int):
    states = torch.ones(1, 8, step, 64, dtype=torch.bfloat16)
    before, huge_before = psutil.Process().memory_info().rss, _huge_kib()
    buffer = BlockBuffer((1, 8, 64), torch.bfloat16, HostMemory(131_072), transposed=True)
    buffer.ensure(1, keep=0)
    for start in range(0, 16_384, step):
        end = min(start + step, 16_384)
        buffer.ensure(end, keep=start)
        buffer.write(start, states[:, :, : end - start])
    assert _huge_kib() - huge_before >= 12 * 1024
    assert psutil.Process().memory_info().rss - before < 16 * 2**20 + 8 * 2**20


@pytest.mark.usefixtures("huge_pages")
def test_what_is_moved_to_a_larger_buffer_is_in_huge_pages_again():
    buffer = BlockBuffer((1, 8, 64), torch.bfloat16, HostMemory(16_384), transposed=True)
    filled(buffer, torch.ones(1, 8, 16_384, 64, dtype=torch.bfloat16))
    place, huge_before = buffer.held.array.ctypes.data, _huge_kib()
    buffer.ensure(16_385, keep=16_384)  # the 16 MiB before are given back
    assert buffer.held.array.ctypes.data != place
    assert _huge_kib() > huge_before - 4 * 1024
    assert (buffer.read_range(0, 16_384) == 1).all()


def test_host_memory_grows_under_a_view_that_outlives_its_buffer():
    buffer = TokenBuffer(SHAPE, torch.float32, HostMemory(20_000, in_rows=False))
    buffer.ensure(1, keep=0)
    first = buffer.read_range(0, 1)
    for num_tokens in LENGTHS:
        buffer.ensure(num_tokens, keep=num_tokens)
        buffer.write(num_tokens - 1, torch.full((2, 3, 1, 8), float(num_tokens)))
        assert buffer.read_range(0, num_tokens).data_ptr() == first.data_ptr()
    del buffer
    # Nothing was rewritten either: the first view sees what was written last, to its own token.
    assert (first == 1).all()


def test_reserved_room_takes_no_memory():
    wait_for_compilation()
    process = psutil.Process()
    before = process.memory_info().rss
    buffer = TokenBuffer((1, 8, 64), torch.bfloat16, HostMemory(2**27, in_rows=False))
    filled(buffer, torch.zeros(1, 8, 64, 64, dtype=torch.bfloat16))
    assert buffer.capacity == 2**27
    assert buffer.num_bytes == 64 * 8 * 64 * 2
    assert process.memory_info().rss - before < 64 * 2**20


def test_expected_tokens_are_allocated_at_once():
    buffer = TokenBuffer(SHAPE, torch.float32, DeviceMemory(torch.device("cpu"), 5000))
    assert buffer.num_bytes == 0
    buffer.ensure(1, keep=0)
    pointer = buffer.read_range(0, 1).data_ptr()
    buffer.ensure(5000, keep=1)
    assert buffer.capacity == 5000
    assert buffer.read_range(0, 1).data_ptr() == pointer


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 4096, 32_768, 131_072])
def test_growth_makes_room_for_an_eighth_more_within_limits(num_tokens: int):
    extra = grown_capacity(num_tokens) - num_tokens
    assert 256 <= extra <= 4096 + GRANULE
    assert grown_capacity(num_tokens) % GRANULE == 0
