"""
Quantization of states to packed blocks, and dequantization.

Codes are asymmetric, from minimum to maximum: the minimum of a group is rounded down to bfloat16, and its scale is
rounded up, so that the largest code reaches the maximum. Codes are computed from the rounded minimum and scale, so
rounding them costs no accuracy. With few codes it is better to cover less than the whole range.
"""

from typing import Any

import numba
import numpy as np
from numba import boolean, float32, float64, int64, uint8, uint16, uint32
from numpy.lib.stride_tricks import as_strided

from ..blocks import BLOCK
from ..vector.calls import kernel_call, taking
from ..vector.compiled import Needed, jit, jit_finite, jit_function, jit_inlined
from ..vector.parallel import split_work, team_of_kernels
from ..vector.rotation import rotate
from ..vector.tiles import pointer
from ..vector.transposition import transpose
from .quantized_blocks import PackedLayout

_SMALLEST_NORMAL, _LARGEST = np.float32(2.0**-126), np.finfo(np.float32).max
_INFINITE, _ONE_BFLOAT16, _UPPER_HALF = np.uint32(0x7F800000), np.uint32(0x10000), np.uint32(0xFFFF0000)
# The bits of 2 ** 64. Smaller numbers stay finite when they are rotated.
_LARGE = np.uint32(0x5F800000)


NOT_FINITE = "infinite, not a number, or so large that sums of them are infinite"


def _bits_of_states(element: np.dtype) -> Any:
    return (uint16 if element == np.uint16 else uint32)[::1]


# One call of `_encode` or `_decode`.
Coding = kernel_call(
    "Coding",
    __name__,
    {
        "states": _bits_of_states,  # float32 or bfloat16 bits, all memory from the first state to the last
        "shift": int64,  # from these bits to those of a float32
        "sequence_stride": int64,
        "head_stride": int64,
        "token_stride": int64,
        "num_kv_heads": int64,
        "dim": int64,
        "packed": uint8[:, :, ::1],  # [blocks, batch * num_kv_heads, bytes]
        "bits": int64,
        "inner": int64,
        "lanes": int64,
        "group": int64,
        "transposed": boolean,
        "rotation": int64,
        "factors": float32[:, ::1],  # [num_kv_heads, dim] of each channel, before rotation or after rotation back
        "share": float64,
        "failures": int64[::1],  # [1] counts blocks with numbers that are not finite
    },
)


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
    if not packed.size:
        return packed
    call = coding_call(states, layout, packed, factors, share)
    _encode(team_of_kernels().address, call)
    if call.failures[0]:
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
    if packed.size:
        _decode(team_of_kernels().address, coding_call(states, layout, packed, factors))


def coding_call(
    states: np.ndarray, layout: PackedLayout, packed: np.ndarray, factors: np.ndarray | None, share: float = 1.0
) -> Any:
    """A call of `_encode` or `_decode`; arguments as in `quantize_blocks`."""
    _, heads, _, dim = states.shape
    factors = np.ones((heads, dim), np.float32) if factors is None else factors
    assert factors.shape == (heads, dim)
    bits = states.view(np.uint32) if states.dtype == np.float32 else states
    strides = [stride // bits.itemsize for stride in bits.strides]
    assert strides[3] == 1
    # One kernel for any strides.
    span = 1 + sum((size - 1) * stride for size, stride in zip(bits.shape, strides, strict=True))
    return Coding(
        states=as_strided(bits, (span,), (bits.itemsize,)),
        shift=0 if states.dtype == np.float32 else 16,
        sequence_stride=strides[0],
        head_stride=strides[1],
        token_stride=strides[2],
        num_kv_heads=heads,
        dim=dim,
        packed=packed,
        bits=layout.bits,
        inner=layout.inner,
        lanes=layout.lanes,
        group=layout.group,
        transposed=layout.transposed,
        rotation=layout.rotation,
        factors=factors,
        share=share,
        failures=np.zeros(1, np.int64),
    )


@jit
def _encode(team, call):
    split_work(team, call.packed.shape[0] * call.packed.shape[1], _quantize_block, call)


@jit
def _decode(team, call):
    split_work(team, call.packed.shape[0] * call.packed.shape[1], _dequantize_block, call)


@jit_function
def in_words(index, bits):
    """The row of words that holds the codes of an index of the inner axis, and the lowest bit of the codes in it."""
    half, place = index % 16 // 8, index % 8
    first_bit = (index // 16 * 8 + place) * bits
    return first_bit // 16, np.uint32(first_bit % 16 + half * 16)


@jit_function
def _place(block, head, call):
    """Index of the first state of one block of one head."""
    sequence, kv_head = divmod(head, call.num_kv_heads)
    return sequence * call.sequence_stride + kv_head * call.head_stride + block * BLOCK * call.token_stride


@jit_inlined
def _run(address, count, one):
    """An array of numbers of the type of `one`. A slice of an array would be counted, by atomic instructions."""
    return numba.carray(pointer(address, one), (count,))


@jit_inlined
def _states(first, call):
    """The states of a token, from the index `first` on."""
    one = call.states.dtype.type(0)
    return _run(call.states.ctypes.data + first * call.states.itemsize, call.dim, one)


@jit_function
def rotated_block(block, head, call):
    """
    The states of one block of one head, times their factors and rotated, `[64, dim]`, and whether all are finite.

    Rows are padded with zeros to a multiple of 16.
    """
    first_state, dim, filled = _place(block, head, call), call.dim, (call.dim + 15) // 16 * 16
    shift, factors = np.uint32(call.shift), call.factors[head % call.num_kv_heads]
    by_token = np.empty((BLOCK, filled), np.float32)
    worst, rows = np.uint32(0), by_token.ctypes.data
    for token in range(BLOCK):
        state = _states(first_state + token * call.token_stride, call)
        row = _run(rows + token * filled * 4, filled, numba.float32(0))
        for d in range(dim):
            number = as_number(np.uint32(state[d]) << shift) * factors[d]
            row[d] = number
            worst = max(worst, np.uint32(np.float32(number).view(np.uint32) & _INFINITE))
        for d in range(dim, filled):
            row[d] = 0
        rotate(row.ctypes.data, dim, call.rotation)
    if worst >= _LARGE:
        for token in range(BLOCK):
            for d in range(dim):
                worst = max(worst, np.uint32(np.float32(by_token[token, d]).view(np.uint32) & _INFINITE))
    return by_token, worst != _INFINITE


@jit_function
def by_channel(tile):
    """A tile `[64, padded dim]` as `[padded dim, 64]`, or the reverse."""
    rows, columns = tile.shape
    turned = np.empty((columns, rows), np.float32)
    transpose(tile.ctypes.data, rows, columns, turned.ctypes.data)
    return turned


@jit_function
def _quantize_block(part, call):
    """Quantize one block of one head."""
    block, head = divmod(part, call.packed.shape[1])
    bits, inner, lanes, dim = call.bits, call.inner, call.lanes, call.dim
    levels = np.float32((1 << bits) - 1)
    by_token, is_finite = rotated_block(block, head, call)
    if not is_finite:
        call.failures[0] += 1
    tile = by_channel(by_token) if call.transposed else by_token
    numbers_of_tile = tile.ctypes.data
    groups = (lanes + call.group - 1) // call.group
    filled_inner, filled_lanes = (dim, BLOCK) if call.transposed else (BLOCK, dim)
    words, scales, minima = _parts(call.packed[block, head], bits, inner, lanes, groups)
    for row in range(words.shape[0]):
        for lane in range(lanes):
            words[row, lane] = 0
    for group in range(groups):
        for index in range(inner):
            scales[group, index] = minima[group, index] = 0
    for group in range(groups):
        start, end = group * call.group, min((group + 1) * call.group, filled_lanes)
        if start < end:
            for index in range(filled_inner):
                numbers = _run(numbers_of_tile + (index * tile.shape[1] + start) * 4, end - start, numba.float32(0))
                least, most = extremes(numbers)
                scale, minimum = scale_and_minimum(least, most, call.share, levels)
                scales[group, index], minima[group, index] = scale >> np.uint32(16), minimum >> np.uint32(16)
                word, position = in_words(index, bits)
                of_group = _run(words.ctypes.data + (word * lanes + start) * 4, end - start, numba.uint32(0))
                put_codes(numbers, as_number(scale), as_number(minimum), levels, of_group, position)


@jit_function
def _parts(packed_block, bits, inner, lanes, groups):
    """The words of a packed block, `[inner * bits / 32, lanes]`, its scales and minima, `[groups, inner]`."""
    first, second = inner * bits // 8 * lanes, groups * inner * 2
    words = packed_block[:first].view(np.uint32).reshape(-1, lanes)
    scales = packed_block[first : first + second].view(np.uint16).reshape(groups, inner)
    minima = packed_block[first + second :].view(np.uint16).reshape(groups, inner)
    return words, scales, minima


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
def as_number(bits):
    """The float32 that has these bits."""
    return np.uint32(bits).view(np.float32)


@jit_function
def rounded_to_upper_half(bits):
    """The bits of the nearest bfloat16, given those of a float32; of two, the even one."""
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16


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
def _dequantize_block(part, call):
    """Dequantize one block of one head."""
    block, head = divmod(part, call.packed.shape[1])
    first_state = _place(block, head, call)
    bits, inner, lanes = call.bits, call.inner, call.lanes
    dim = call.dim
    filled_inner, filled_lanes = (dim, BLOCK) if call.transposed else (BLOCK, dim)
    groups = (lanes + call.group - 1) // call.group
    words, scales, minima = _parts(call.packed[block, head], bits, inner, lanes, groups)
    mask = np.uint32((1 << bits) - 1)
    tile = np.zeros((inner, lanes), np.float32)
    for index in range(filled_inner):
        word, position = in_words(index, bits)
        for group in range(groups):
            scale = as_number(np.uint32(scales[group, index]) << np.uint32(16))
            minimum = as_number(np.uint32(minima[group, index]) << np.uint32(16))
            for lane in range(group * call.group, min((group + 1) * call.group, filled_lanes)):
                code = np.float32((words[word, lane] >> position) & mask)
                tile[index, lane] = minimum + scale * code
    by_token = by_channel(tile) if call.transposed else tile
    rows, filled = by_token.ctypes.data, by_token.shape[1]
    factors = call.factors[head % call.num_kv_heads]
    for token in range(BLOCK):
        rotate(rows + token * filled * 4, dim, call.rotation)
        state = _states(first_state + token * call.token_stride, call)
        for d in range(dim):
            number = np.float32(by_token[token, d] * factors[d]).view(np.uint32)
            if call.shift:
                number = rounded_to_upper_half(number)
            state[d] = number


def coding_kernels(element: np.dtype) -> list[Needed]:
    """The kernels that quantize and dequantize states of `element`."""
    return [(kernel, taking(Coding, element)) for kernel in (_encode, _decode)]
