"""
The index of a sequence: codes of 2 bits of all keys, by which the selection finds the pages to read.

Keys are rotated (`rotation`), and the mean of each block of 64 is subtracted. The rest of a key is quantized to 2 bits
with one scale: code u stands for `scale * (u - 1.5)`. So the query is rounded once for all blocks, a scale is one
factor of a score, and a mean adds one number to the scores of its block.

The packed block of one block and head, padded to a multiple of 64 bytes, is:
    words  uint32 `[inner / 16, 64]`, as in `quantized_blocks`
    scales bfloat16 `[64]`
    means  bfloat16 `[inner]`, of the rotated channels
"""

import numpy as np

from ..blocks import BLOCK
from ..quantized.quantization import (
    Coding,
    as_number,
    by_channel,
    coding_call,
    in_words,
    rotated_block,
    rounded_to_upper_half,
)
from ..quantized.quantized_blocks import PackedLayout
from ..vector.calls import taking
from ..vector.compiled import Needed, jit, jit_function
from ..vector.parallel import split_work, team_of_kernels
from ..vector.vector_ir import CACHE_LINE

INDEX_BITS = 2
_LARGEST_CODE = 2**INDEX_BITS - 1
CENTRE = _LARGEST_CODE / 2  # the middle of the codes stands for zero
# Step between codes over the root mean square: with four codes it loses least of normally distributed numbers (Max,
# 1960, https://doi.org/10.1109/TIT.1960.1057548).
_STEP = np.float32(0.9957)
_NOT_A_NUMBER = np.uint16(0x7FC0)


def index_layout(key_dim: int) -> PackedLayout:
    """Layout of the codes, with which a packed block begins."""
    return PackedLayout.of_keys(INDEX_BITS, key_dim, BLOCK, True)


def index_bytes(key_dim: int) -> int:
    """Bytes of one packed block."""
    layout = index_layout(key_dim)
    used = layout.words * BLOCK * 4 + (BLOCK + layout.inner) * 2
    return -(-used // CACHE_LINE) * CACHE_LINE


def quantize_index(keys: np.ndarray, packed: np.ndarray) -> None:
    """
    Write the index of whole blocks.

    If a key has a number that is not finite, the scales of its block, and so all scores there, are NaN.

    Args:
        keys: `[batch, num_kv_heads, blocks * 64, key_dim]`, float32, or uint16 for bfloat16 bits; the last axis
            contiguous.
        packed: uint8 `[blocks, batch * num_kv_heads, index_bytes(key_dim)]`, contiguous, written.
    """
    if packed.size:
        _quantize_index(team_of_kernels().address, coding_call(keys, index_layout(keys.shape[3]), packed, None))


@jit
def _quantize_index(team, call):
    split_work(team, call.packed.shape[0] * call.packed.shape[1], _quantize_block, call)


@jit_function
def _quantize_block(part, call):
    """Write the index of one block of one head."""
    block, head = divmod(part, call.packed.shape[1])
    by_token, is_finite = rotated_block(block, head, call)
    numbers = by_channel(by_token)
    packed_block, dim, inner = call.packed[block, head], call.dim, call.inner
    first, second = inner * INDEX_BITS // 8 * BLOCK, BLOCK * 2
    words = packed_block[:first].view(np.uint32).reshape(-1, BLOCK)
    scales = packed_block[first : first + second].view(np.uint16)
    means = packed_block[first + second : first + second + inner * 2].view(np.uint16)
    for row in range(words.shape[0]):
        for token in range(BLOCK):
            words[row, token] = 0
    squares, reciprocals = np.zeros(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for d in range(inner):
        means[d] = 0
    for d in range(dim):
        total = np.float32(0)
        for token in range(BLOCK):
            total += numbers[d, token]
        means[d] = _as_bfloat16(total * np.float32(1 / BLOCK))
        mean = as_number(np.uint32(means[d]) << np.uint32(16))
        for token in range(BLOCK):
            left = numbers[d, token] - mean
            numbers[d, token] = left
            squares[token] += left * left
    for token in range(BLOCK):
        step = np.sqrt(squares[token] / np.float32(dim)) * _STEP
        reciprocals[token] = np.float32(1) / step if step > 0 else np.float32(0)
    products, norms = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    for d in range(dim):
        word, position = in_words(d, INDEX_BITS)
        row = words[word]
        for token in range(BLOCK):
            left = numbers[d, token]
            place = left * reciprocals[token] + np.float32(CENTRE + 0.5)
            place = place if place > 0 else np.float32(0)
            code = np.int32(place if place < _LARGEST_CODE else np.float32(_LARGEST_CODE))
            row[token] |= np.uint32(np.uint32(code) << position)
            centred = np.float32(code) - np.float32(CENTRE)
            products[token] += left * centred
            norms[token] += centred * centred
    for token in range(BLOCK):  # the scale by which the codes are nearest to the key
        scales[token] = _as_bfloat16(products[token] / norms[token]) if is_finite else _NOT_A_NUMBER


@jit_function
def _as_bfloat16(number):
    """The bits of the nearest bfloat16 of a float32."""
    return np.uint16(rounded_to_upper_half(np.float32(number).view(np.uint32)))


def index_kernels(element: np.dtype) -> list[Needed]:
    """The kernel that writes the index of keys of `element`."""
    return [(_quantize_index, taking(Coding, element))]
