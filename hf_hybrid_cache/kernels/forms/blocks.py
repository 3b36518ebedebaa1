"""
Blocks: keys or values of 64 tokens of one KV head, in full precision or quantized to 8, 4 or 2 bits.

In full precision keys of a block are `[head_dim, 64]`, transposed, and values `[64, value_width]`. Both products of
attention then run along contiguous memory, times one number of the query or one weight. Blocks follow each other as
`[blocks, heads, ...]`, so that any run of blocks is one piece of memory, whatever the number of heads.

In a packed block a code u stands for `minimum + scale * u`. Minimum and scale are constant over a group of lanes, and
differ along the axis that a product sums over: keys have them per channel for a group of tokens, values per token for a
group of channels (KIVI, arXiv:2402.02750). So they fold into the query, or into the weights, before the product.

A packed block is three arrays, with `inner` the axis that is summed over and `lanes` the other one:
    words  uint32 `[inner * bits / 32, lanes]`
    scales bfloat16 `[groups, inner]`
    minima bfloat16 `[groups, inner]`
The two halves of a word hold codes of indices that are 8 apart: where the low half has index `16 c + p`, the high half
has `16 c + 8 + p`, p < 8. A mask and a shift then give pairs of 16-bit numbers, as the processor's dot products take.

The minimum of a group is rounded down to bfloat16, and its scale is rounded up, so that the largest code reaches the
maximum. Codes are computed from the rounded minimum and scale, so rounding them costs no accuracy. With few codes it is
better to cover less than the whole range.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from ..vector.code_tiles import MOST_BITS_OF_QUADS
from ..vector.compiled import Kernel, Needed, jit, jit_finite, jit_function, taking_numbers
from ..vector.intrinsics import call_at, transpose
from ..vector.numbers_at import (
    Numbers,
    array_at,
    as_double,
    as_number,
    bfloat16_at,
    bits_of_double,
    floats_at,
    integers_at,
    load_numbers,
    store_numbers,
)
from ..vector.parallel import split_work, team_of_kernels
from ..vector.rotation import rotate, rotation_size
from ..vector.vector_ir import BLOCK, LANES

NOT_FINITE = "infinite, not a number, or so large that sums of them are infinite"

_SMALLEST_NORMAL, _LARGEST = np.float32(2.0**-126), np.finfo(np.float32).max
_INFINITE, _ONE_BFLOAT16, _UPPER_HALF = np.uint32(0x7F800000), np.uint32(0x10000), np.uint32(0xFFFF0000)
# The bits of 2 ** 64. Smaller numbers stay finite when they are rotated.
_LARGE = np.uint32(0x5F800000)


class PackedLayout(NamedTuple):
    """
    Layout of the packed blocks of a layer's keys, or of its values. Kernels read it in memory.

    Attributes:
        bits: of a code.
        inner: length of the axis that is summed over, padded to a multiple of 16.
        lanes: length of the other axis, padded to a multiple of 16.
        group: lanes that share a scale.
        groups: their number.
        dim: width of a key or value, without padding.
        transposed: whether tokens are the lanes, as for keys.
        rotation: channels that are rotated together before quantization, see `vector.rotation`; 1 for none.
        scales: bytes before the scales.
        minima: bytes from the scales to the minima.
        num_bytes: bytes of a packed block, a multiple of 64, because inner and lanes are multiples of 16.
        limit: largest integer that what is folded with the codes is rounded to.
    """

    bits: int
    inner: int
    lanes: int
    group: int
    groups: int
    dim: int
    transposed: int
    rotation: int
    scales: int
    minima: int
    num_bytes: int
    limit: int

    @classmethod
    @cache
    def of_keys(cls, bits: int, key_dim: int, group: int, is_rotated: bool) -> "PackedLayout":
        return cls._of(bits, value_width(key_dim), BLOCK, group, key_dim, True, is_rotated)

    @classmethod
    @cache
    def of_values(cls, bits: int, value_dim: int, group: int, is_rotated: bool) -> "PackedLayout":
        return cls._of(bits, BLOCK, value_width(value_dim), group, value_dim, False, is_rotated)

    @classmethod
    def _of(
        cls, bits: int, inner: int, lanes: int, group: int, dim: int, transposed: bool, is_rotated: bool
    ) -> "PackedLayout":
        group, rotation = min(group, lanes), rotation_size(dim) if is_rotated else 1
        groups = -(-lanes // group)
        scales, minima = inner * bits // 8 * lanes, groups * inner * 2
        # To 8 bits, of a query or of weights, which are positive; or so that sums of products with codes fit 32 bits.
        limit = (127 if transposed else 255) if bits <= MOST_BITS_OF_QUADS else 32767
        limit = min(limit, (2**31 - 1) // ((2**bits - 1) * inner))
        numbers = bits, inner, lanes, group, groups, dim, transposed, rotation, scales, minima, scales + 2 * minima
        return cls(*numbers, limit)

    @property
    def words(self) -> int:
        """Rows of words."""
        return self.inner * self.bits // 32


def value_width(value_dim: int) -> int:
    """Numbers in a stored row of values: `value_dim`, padded to whole vectors of sixteen."""
    return -(-value_dim // LANES) * LANES


class Coding(NamedTuple):
    """
    One call of `_encode` or `_decode`; in memory a `PackedLayout` follows it.

    Attributes:
        states: address of the first state.
        is_bfloat16: whether states are bfloat16; otherwise they are float32.
        sequence_stride, head_stride, token_stride: of states, in bytes.
        blocks: of a head.
        heads: KV heads of all sequences.
        num_kv_heads: of a sequence.
        packed: address of uint8 `[blocks, heads, num_bytes]`.
        factors: address of float32 `[num_kv_heads, dim]`, of each channel, before rotation or after rotation back.
        share: of a group's range that codes cover, the bits of a float64.
        failure: address of int64, set to 1 if some number is not finite.
    """

    states: int
    is_bfloat16: int
    sequence_stride: int
    head_stride: int
    token_stride: int
    blocks: int
    heads: int
    num_kv_heads: int
    packed: int
    factors: int
    share: int
    failure: int


_LAYOUT = 8 * len(Coding._fields)


def quantize_blocks(
    states: np.ndarray, layout: PackedLayout, share: float = 1.0, factors: np.ndarray | None = None
) -> np.ndarray:
    """
    Quantize whole blocks.

    Args:
        states: `[batch, num_kv_heads, blocks * 64, dim]`, float32, or uint16 for bfloat16 bits; the last axis
            contiguous.
        layout: of the packed blocks.
        share: part of a group's range, around its middle, that codes cover; numbers beyond get the nearest code.
        factors: float32 `[num_kv_heads, dim]`, by which channels are multiplied before they are rotated.

    Returns:
        uint8 `[blocks, batch * num_kv_heads, layout.num_bytes]`.

    Raises:
        ValueError: some of the states are infinite or not a number, or become so when they are rotated.
    """
    batch, heads, tokens, _ = states.shape
    packed = np.empty((tokens // BLOCK, batch * heads, layout.num_bytes), np.uint8)
    if _run(_encode, states, layout, packed, factors, share):
        raise ValueError(NOT_FINITE)
    return packed


def dequantize_blocks(
    packed: np.ndarray, layout: PackedLayout, states: np.ndarray, factors: np.ndarray | None = None
) -> None:
    """
    Dequantize blocks.

    Args:
        packed: `[blocks, batch * num_kv_heads, layout.num_bytes]`, contiguous.
        layout: of the packed blocks.
        states: written, as `quantize_blocks` takes them.
        factors: float32 `[num_kv_heads, dim]`, by which channels are multiplied after they were rotated back.
    """
    _run(_decode, states, layout, packed, factors)


def _run(
    kernel: Kernel,
    states: np.ndarray,
    layout: PackedLayout,
    packed: np.ndarray,
    factors: np.ndarray | None,
    share: float = 1.0,
) -> bool:
    """Run `_encode` or `_decode`; return whether some number is not finite."""
    if not packed.size:
        return False
    batch, heads, _, dim = states.shape
    factors = np.ones((heads, dim), np.float32) if factors is None else np.ascontiguousarray(factors, np.float32)
    assert factors.shape == (heads, dim)
    assert states.dtype in (np.float32, np.uint16)
    assert states.strides[3] == states.itemsize
    assert packed.flags.c_contiguous
    assert packed.shape[1:] == (batch * heads, layout.num_bytes)
    failure = np.zeros(1, np.int64)
    call = Coding(
        states=states.ctypes.data,
        is_bfloat16=states.dtype == np.uint16,
        sequence_stride=states.strides[0],
        head_stride=states.strides[1],
        token_stride=states.strides[2],
        blocks=len(packed),
        heads=batch * heads,
        num_kv_heads=heads,
        packed=packed.ctypes.data,
        factors=factors.ctypes.data,
        share=bits_of_double(share),
        failure=failure.ctypes.data,
    )
    numbers = np.array([*call, *layout], np.int64)
    kernel(team_of_kernels().address, numbers.ctypes.data)
    return bool(failure[0])


@jit
def _encode(team, address):
    call = call_at(address, Coding)
    split_work(team, call.blocks * call.heads, _quantize_block, address)


@jit
def _decode(team, address):
    call = call_at(address, Coding)
    split_work(team, call.blocks * call.heads, _dequantize_block, address)


def coding_kernels() -> list[Needed]:
    """The kernels that quantize and dequantize states."""
    return [(kernel, taking_numbers(kernel)) for kernel in (_encode, _decode)]


@jit_function
def in_words(index, bits):
    """The row of words that holds the codes of an index of the inner axis, and the lowest bit of the codes in it."""
    half, place = index % 16 // 8, index % 8
    first_bit = (index // 16 * 8 + place) * bits
    return first_bit // 16, np.uint32(first_bit % 16 + half * 16)


@jit_function
def _state_of(part, call, dim):
    """The first state of a block of one head, and the factors of the head."""
    block, head = divmod(part, call.heads)
    sequence, kv_head = divmod(head, call.num_kv_heads)
    offset = sequence * call.sequence_stride + kv_head * call.head_stride + block * BLOCK * call.token_stride
    return call.states + offset, floats_at(call.factors + kv_head * dim * 4, dim)


@jit_function
def _packed_of(part, call, layout):
    """The addresses of a packed block's words, scales and minima."""
    words = call.packed + part * layout.num_bytes
    scales = words + layout.scales
    return words, scales, scales + layout.minima


@jit_function
def _quantize_block(part, address):
    """Quantize one block of one head."""
    call, layout = call_at(address, Coding), call_at(address + _LAYOUT, PackedLayout)
    bits, inner, lanes = layout.bits, layout.inner, layout.lanes
    levels, share = np.float32((1 << bits) - 1), as_double(call.share)
    width, filled_inner, filled_lanes = lanes, BLOCK, layout.dim
    tile = np.empty(inner * lanes, np.float32)
    if not _load_rotated(part, tile, call, layout):
        integers_at(call.failure, 1)[0] = 1
    if layout.transposed:
        tile, width, filled_inner, filled_lanes = _transposed(tile, BLOCK, inner), BLOCK, layout.dim, BLOCK
    words, scales, minima = _packed_of(part, call, layout)
    array_at(words, layout.num_bytes, np.uint8(0))[:] = 0
    for group in range(layout.groups):
        start, end = group * layout.group, min((group + 1) * layout.group, filled_lanes)
        if start < end:
            scales_of_group = array_at(scales + group * inner * 2, inner, np.uint16(0))
            minima_of_group = array_at(minima + group * inner * 2, inner, np.uint16(0))
            for index in range(filled_inner):
                numbers = floats_at(tile.ctypes.data + (index * width + start) * 4, end - start)
                least, most = extremes(numbers)
                scale, minimum = scale_and_minimum(least, most, share, levels)
                scales_of_group[index], minima_of_group[index] = scale >> np.uint32(16), minimum >> np.uint32(16)
                word, position = in_words(index, bits)
                of_group = array_at(words + (word * lanes + start) * 4, end - start, np.uint32(0))
                put_codes(numbers, as_number(scale), as_number(minimum), levels, of_group, position)


@jit_function
def _load_rotated(part, tile, call, layout):
    """Write the states of one block, times their factors and rotated, to `tile`; return whether all are finite."""
    state, factors = _state_of(part, call, layout.dim)
    dim, width, worst = layout.dim, tile.size // BLOCK, np.uint32(0)
    for token in range(BLOCK):
        row = floats_at(tile.ctypes.data + token * width * 4, width)
        load_numbers(Numbers(state + token * call.token_stride, call.is_bfloat16 != 0), 0, dim, row)
        for d in range(dim):
            number = row[d] * factors[d]
            row[d] = number
            worst = max(worst, _exponent(number))
        for d in range(dim, width):
            row[d] = 0
        rotate(row.ctypes.data, dim, layout.rotation)
    if worst >= _LARGE:
        for number in tile:
            worst = max(worst, _exponent(number))
    return worst != _INFINITE


@jit_function
def _transposed(tile, rows, columns):
    turned = np.empty(tile.size, np.float32)
    transpose(tile.ctypes.data, rows, columns, turned.ctypes.data)
    return turned


@jit_function
def _exponent(number):
    """The bits of a number's exponent: they are `_INFINITE` if it is not finite."""
    return np.uint32(np.float32(number).view(np.uint32) & _INFINITE)


@jit_finite
def extremes(numbers):
    """The least and the largest number of a group. Numba makes no vector instructions of `min` and `max`."""
    least = most = numbers[0]
    for number in numbers:
        least = number if number < least else least
        most = number if number > most else most
    return least, most


@jit_finite
def put_codes(numbers, scale, minimum, levels, words, position):
    """Put the codes of a group into words, from the bit `position` on."""
    half = np.float32(0.5)
    half_minimum = minimum * half
    reciprocal = np.float32(2) / scale if scale > 0 else np.float32(0)
    for lane in range(numbers.size):
        code = (numbers[lane] * half - half_minimum) * reciprocal + half
        code = code if code > 0 else np.float32(0)
        code = code if code < levels else levels
        words[lane] |= np.uint32(np.uint32(np.int32(code)) << position)


@jit_function
def scale_and_minimum(least, most, share, levels):
    """The scale and the minimum of a group, as bits of float32."""
    if share < 1:
        part = np.float32((1 - share) / 2)
        cut = most * part - least * part
        least, most = least + cut, most - cut
    half = np.float32(0.5)
    minimum_bits = _rounded_down(least)
    minimum = as_number(minimum_bits)
    if most <= minimum:
        return np.uint32(0), minimum_bits
    # Divide first: the difference of two large numbers may be infinite.
    scale_bits = _rounded_up(max(most / levels - minimum / levels, _SMALLEST_NORMAL))
    if minimum * half + levels * (as_number(scale_bits) * half) > _LARGEST * half:
        scale_bits = np.uint32(scale_bits - _ONE_BFLOAT16)
    return scale_bits, minimum_bits


@jit_function
def _rounded_down(number):
    """The bits of the largest finite bfloat16 not above a number; if there is none, of the lowest bfloat16."""
    bits = np.float32(number).view(np.uint32)
    result = np.uint32(bits & _UPPER_HALF)
    if result != bits and number < 0:
        result = np.uint32(result + _ONE_BFLOAT16)
    return np.uint32(result - _ONE_BFLOAT16) if result & _INFINITE == _INFINITE else result


@jit_function
def _rounded_up(number):
    """The bits of the least finite bfloat16 not below a number; if there is none, of the highest bfloat16."""
    bits = _rounded_down(-number)
    return np.uint32(bits ^ np.uint32(0x80000000))


@jit_function
def _dequantize_block(part, address):
    """Dequantize one block of one head."""
    call, layout = call_at(address, Coding), call_at(address + _LAYOUT, PackedLayout)
    bits, inner, lanes, dim = layout.bits, layout.inner, layout.lanes, layout.dim
    filled_inner, filled_lanes = (dim, BLOCK) if layout.transposed else (BLOCK, dim)
    first_word, first_scale, first_minimum = _packed_of(part, call, layout)
    mask = np.uint32((1 << bits) - 1)
    tile = np.zeros(inner * lanes, np.float32)
    for index in range(filled_inner):
        word, position = in_words(index, bits)
        words = array_at(first_word + word * lanes * 4, lanes, np.uint32(0))
        row = floats_at(tile.ctypes.data + index * lanes * 4, lanes)
        for group in range(layout.groups):
            offset = (group * inner + index) * 2
            scale, minimum = bfloat16_at(first_scale + offset), bfloat16_at(first_minimum + offset)
            for lane in range(group * layout.group, min((group + 1) * layout.group, filled_lanes)):
                row[lane] = minimum + scale * np.float32((words[lane] >> position) & mask)
    width = lanes
    if layout.transposed:
        tile, width = _transposed(tile, inner, BLOCK), inner
    state, factors = _state_of(part, call, layout.dim)
    for token in range(BLOCK):
        row = floats_at(tile.ctypes.data + token * width * 4, width)
        rotate(row.ctypes.data, dim, layout.rotation)
        for d in range(dim):
            row[d] *= factors[d]
        store_numbers(row, Numbers(state + token * call.token_stride, call.is_bfloat16 != 0), 0, dim)
