"""Growing buffers: what is stored stays where it is, sizes straddle the chunks, reserved room takes no memory."""

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from contracts.buffers import LENGTHS, SHAPE, BufferContract

from hf_hybrid_cache.kernels import BLOCK, value_width
from hf_hybrid_cache.storage.memory.buffer_memory import DeviceMemory, HostMemory
from hf_hybrid_cache.storage.memory.growth import GRANULE, grown_capacity
from hf_hybrid_cache.storage.runs.block_buffer import BlockBuffer
from hf_hybrid_cache.storage.runs.token_buffer import TokenBuffer

from common.programs import wait_for_compilation

CPU = torch.device("cpu")
DEVICE = DeviceMemory(CPU)


def in_host_memory(expected_entries: int) -> TokenBuffer:
    """Tokens as torch's attention on a CPU reads them."""
    return TokenBuffer(SHAPE, torch.float32, HostMemory(expected_entries, in_rows=False))


class TestTokensInHostMemory(BufferContract):
    expected_tokens = 20_000

    def make(self) -> TokenBuffer:
        return in_host_memory(expected_entries=self.expected_tokens)


class TestTokensInHostMemoryThatOutgrowTheirReservation(TestTokensInHostMemory):
    expected_tokens = 100


class TestTokensOnDevice(BufferContract):
    def make(self) -> TokenBuffer:
        return TokenBuffer(SHAPE, torch.float32, DEVICE)


class TestTokensOnDeviceInRows(BufferContract):
    def make(self) -> TokenBuffer:
        return TokenBuffer(SHAPE, torch.float32, DEVICE, token_major=True)


class TestTokensInHostMemoryInRows(BufferContract):
    def make(self) -> TokenBuffer:
        return TokenBuffer(SHAPE, torch.float32, HostMemory(20_000), token_major=True)


class TestBlocksOfKeys(BufferContract):
    expected_tokens = 20_000

    def make(self) -> BlockBuffer:
        return BlockBuffer(SHAPE, torch.float32, HostMemory(self.expected_tokens), transposed=True)


class TestBlocksOfKeysThatOutgrowTheirReservation(TestBlocksOfKeys):
    expected_tokens = 100


class TestBlocksOfValues(BufferContract):
    def make(self) -> BlockBuffer:
        return BlockBuffer(SHAPE, torch.float32, HostMemory(20_000), transposed=False)


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[-1:], LENGTHS[:1]], ids=len)
def test_planned_bytes_of_records_are_those_held_after_growing(lengths: list[int]):
    planned, buffer = (TokenBuffer(SHAPE, torch.uint8, HostMemory(20_000, GRANULE), token_major=True) for _ in range(2))
    for num_records in lengths:
        buffer.ensure(num_records, keep=0)
    assert planned.planned_bytes(lengths) == buffer.num_bytes


@pytest.mark.covering(2)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("transposed", [True, False], ids=["keys", "values"])
def test_blocks_go_to_a_device_and_come_back(transposed: bool, dtype: torch.dtype, num_tokens: int):
    states = torch.randn(SHAPE[0], SHAPE[1], num_tokens, SHAPE[2]).to(dtype)
    device = TokenBuffer(SHAPE, dtype, DEVICE, token_major=True)
    device.ensure(num_tokens, keep=0)
    device.write(0, states)
    blocks = BlockBuffer(SHAPE, dtype, HostMemory(20_000), transposed)
    blocks.ensure(num_tokens, keep=0)
    blocks.save(device, 0, num_tokens // 2 + 1)
    blocks.save(device, num_tokens // 2, num_tokens)
    assert torch.equal(blocks.read_range(0, num_tokens), states)
    back = TokenBuffer(SHAPE, dtype, DEVICE, token_major=True)
    back.ensure(num_tokens, keep=0)
    blocks.load(back, 0, num_tokens)
    assert torch.equal(back.read_range(0, num_tokens), states)


def test_a_block_is_what_the_kernels_read():
    states = torch.arange(100.0).view(1, 1, 100, 1) + torch.arange(20.0) / 32
    keys, values = (BlockBuffer((1, 1, 20), torch.float32, HostMemory(), transposed) for transposed in (True, False))
    for buffer in (keys, values):
        buffer.ensure(100, keep=0)
        buffer.write(0, states)
    assert GRANULE == BLOCK
    assert keys.held.array.shape[1:] == (1, 20, BLOCK)
    assert values.held.array.shape[1:] == (1, BLOCK, value_width(20))
    assert (keys.held.array[1, 0, :, 5] == states[0, 0, BLOCK + 5].numpy()).all()
    assert (values.held.array[1, 0, 5, :20] == states[0, 0, BLOCK + 5].numpy()).all()
    assert (values.held.array[:, :, :, 20:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_see_the_bits_that_were_written(dtype: torch.dtype):
    states = torch.randn(1, 1, 64, 16).to(dtype)
    buffer = BlockBuffer((1, 1, 16), dtype, HostMemory(), transposed=False)
    buffer.ensure(64, keep=0)
    buffer.write(0, states)
    seen = torch.from_numpy(buffer.held.array.copy()).view(dtype)
    assert torch.equal(seen[0, 0], states[0, 0])


def _huge_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def _given_huge_kib() -> int:
    """Return the KiB of huge pages that the system gives a plain mapping that asks for them."""
    before = _huge_kib()
    with mmap.mmap(-1, 18 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(pages, np.uint8).fill(1)
        return _huge_kib() - before


def _has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not _has_huge_pages(), reason="the system has no transparent huge pages, or has them switched off")
@pytest.mark.parametrize("step", [16_384, 100])
def test_full_huge_pages_are_used_and_no_memory_beyond_what_is_written(step: int):
    if _given_huge_kib() < 12 * 1024:
        pytest.skip("the system has no huge pages to give just now")
    wait_for_compilation()
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


@pytest.mark.skipif(not _has_huge_pages(), reason="the system has no transparent huge pages, or has them switched off")
def test_what_is_moved_to_a_larger_buffer_is_in_huge_pages_again():
    if _given_huge_kib() < 12 * 1024:
        pytest.skip("the system has no huge pages to give just now")
    buffer = BlockBuffer((1, 8, 64), torch.bfloat16, HostMemory(16_384), transposed=True)
    buffer.ensure(16_384, keep=0)
    buffer.write(0, torch.ones(1, 8, 16_384, 64, dtype=torch.bfloat16))
    place, huge_before = buffer.held.array.ctypes.data, _huge_kib()
    buffer.ensure(16_385, keep=16_384)  # the 16 MiB before are given back
    assert buffer.held.array.ctypes.data != place
    assert _huge_kib() > huge_before - 4 * 1024
    assert (buffer.read_range(0, 16_384) == 1).all()


def test_host_memory_grows_without_moving_or_copying_what_is_stored():
    buffer = in_host_memory(expected_entries=20_000)
    buffer.ensure(1, keep=0)
    first = buffer.read_range(0, 1)
    for num_tokens in LENGTHS:
        buffer.ensure(num_tokens, keep=num_tokens)
        buffer.write(num_tokens - 1, torch.full((2, 3, 1, 8), float(num_tokens)))
        assert buffer.read_range(0, num_tokens).data_ptr() == first.data_ptr()
    # Nothing was rewritten either: the first view sees what was written last, to its own token.
    assert first[0, 0, 0, 0] == 1.0


def test_a_view_outlives_its_buffer():
    buffer = in_host_memory(expected_entries=20_000)
    buffer.ensure(5, keep=0)
    buffer.write(0, torch.ones(2, 3, 5, 8))
    view = buffer.read_range(0, 5)
    del buffer
    assert view.sum() == view.numel()


def test_reserved_room_takes_no_memory():
    wait_for_compilation()
    process = psutil.Process()
    before = process.memory_info().rss
    buffer = TokenBuffer((1, 8, 64), torch.bfloat16, HostMemory(2**27, in_rows=False))
    buffer.ensure(64, keep=0)
    buffer.write(0, torch.zeros(1, 8, 64, 64, dtype=torch.bfloat16))
    assert buffer.capacity == 2**27
    assert buffer.num_bytes == 64 * 8 * 64 * 2
    assert process.memory_info().rss - before < 64 * 2**20


def test_expected_tokens_are_allocated_at_once():
    buffer = TokenBuffer(SHAPE, torch.float32, DeviceMemory(CPU, 5000))
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


LIMITED = """
import resource, torch
from hf_hybrid_cache.storage.memory.address_space import reserve
from hf_hybrid_cache.storage.memory.buffer_memory import HostMemory
from hf_hybrid_cache.storage.runs.token_buffer import TokenBuffer
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
assert reserve(2**30) is None
buffer = TokenBuffer((1, 2, 64), torch.float32, HostMemory(2**24, in_rows=False))
expected = torch.arange(3000.0).view(1, 1, -1, 1).expand(1, 2, -1, 64)
for end in range(100, 3001, 100):
    buffer.ensure(end, keep=end - 100)
    buffer.write(end - 100, expected[:, :, end - 100 : end])
assert torch.equal(buffer.read_range(0, 3000), expected)
assert buffer.capacity < 4096
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space, which Linux enforces")
def test_without_address_space_to_reserve_the_buffer_grows_in_chunks():
    subprocess.run([sys.executable, "-c", LIMITED], check=True, timeout=120)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files are mapped over reserved memory on Linux only")
@pytest.mark.parametrize("expected_tokens", [0, BLOCK, 100 * BLOCK])
def test_what_is_mapped_from_a_file_stays_where_it_is_when_tokens_follow(tmp_path: Path, expected_tokens: int):
    saved, buffer = (BlockBuffer(SHAPE, torch.float32, HostMemory(expected_tokens), True) for _ in range(2))
    tokens = 4 * BLOCK
    saved.ensure(tokens, keep=0)
    states = torch.randn(*SHAPE[:2], tokens + 1, SHAPE[2])
    saved.write(0, states[:, :, :tokens])
    path = tmp_path / "rows"
    path.write_bytes(saved.stored_rows(tokens).numpy().tobytes())
    with path.open("rb") as file:
        assert buffer.map_file(file.fileno(), 0, tokens)
    place = buffer.stored_rows(1).data_ptr()
    buffer.ensure(tokens + 1, keep=tokens)
    buffer.write(tokens, states[:, :, tokens:])
    assert buffer.stored_rows(1).data_ptr() == place
    assert torch.equal(buffer.read_range(0, tokens + 1), states)
