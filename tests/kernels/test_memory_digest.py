"""The digest of memory, beside one in NumPy, and what it must notice."""

import numpy as np
import pytest

from hf_hybrid_cache.kernels import PIECE_BYTES, digest_memories

SIZES = [0, 1, 7, 255, 256, 257, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 777]


def reference(data: bytes) -> bytes:
    odd, digests = np.uint64(0x9E3779B97F4A7C15), []
    for first in range(0, len(data), PIECE_BYTES):
        piece = data[first : first + PIECE_BYTES]
        words = np.frombuffer(piece + bytes(-len(piece) % 256), "<u8").reshape(-1, 32)
        lanes = np.arange(1, 33, dtype=np.uint64) * odd
        for row in words:
            lanes = (lanes ^ row) * odd
            lanes = lanes << np.uint64(29) | lanes >> np.uint64(35)
        digests.append(lanes.astype("<u8").tobytes())
    return b"".join(digests)


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def digest(array: np.ndarray) -> bytes:
    [found] = digest_memories([(array.ctypes.data, array.nbytes)])
    return found


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("size", SIZES)
def test_digest_when_at_any_address_then_is_that_of_numpy(size: int, offset: int):
    data = random_bytes(size + offset)[offset:]
    assert digest(data) == reference(data.tobytes())


def test_digests_when_of_several_memories_then_are_those_of_each():
    memories = [random_bytes(size) for size in SIZES]
    digests = digest_memories([(each.ctypes.data, each.nbytes) for each in memories])
    assert digests == [digest(each) for each in memories]
    assert digest_memories([]) == []


@pytest.mark.parametrize("size", [1, 255, 256, 4096, 70_001])
def test_digest_when_one_bit_is_flipped_then_differs(size: int):
    data = random_bytes(size)
    before = digest(data)
    places = np.random.default_rng(0).integers(0, 8 * size, 500)
    for place in [*places.tolist(), 0, 8 * size - 1]:
        data[place // 8] ^= 1 << place % 8
        assert digest(data) != before, place
        data[place // 8] ^= 1 << place % 8
    assert digest(data) == before


@pytest.mark.parametrize("row_bytes", [8, 64, 256, 512, PIECE_BYTES])
def test_digest_when_two_rows_are_exchanged_then_differs(row_bytes: int):
    rows = random_bytes(4 * row_bytes).reshape(4, row_bytes)
    for first in range(4):
        for second in range(first):
            order = list(range(4))
            order[first], order[second] = second, first
            assert digest(rows[order]) != digest(rows)


@pytest.mark.parametrize("item", [np.uint16, np.uint32])
def test_digest_when_all_signs_change_then_differs(item: type):
    numbers = random_bytes(2**16).view(item)
    sign = item(1 << (8 * numbers.itemsize - 1))
    digests = {digest(numbers), digest(numbers ^ sign)}
    for rows in (slice(0, 64), slice(0, 256), slice(None, None, 2), slice(1, None, 4)):
        changed = numbers.copy()
        changed[rows] ^= sign
        digests.add(digest(changed))
    assert len(digests) == 6


def test_digest_of_zeros_when_a_step_longer_then_differs():
    zeros = np.zeros(2 * PIECE_BYTES, np.uint8)
    assert len({digest(zeros[:size]) for size in range(256, zeros.size + 1, 256)}) == zeros.size // 256
