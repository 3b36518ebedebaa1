"""
From states to the records of coded blocks, and back.

Asymmetric min-max codes: the low of a group is its minimum, rounded down to bfloat16, and its scale lets the largest
code reach the maximum, rounded up. Codes are computed against the rounded numbers, so rounding costs no accuracy. With
few codes it is better to cover less than the whole range.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.lib.stride_tricks import as_strided

from .blocks import BLOCK
from .coded_blocks import RecordLayout
from .compiled import Needed, jit, jit_finite, jit_inlined, jit_part
from .parallel import share_out, team_of_kernels
from .rotation import rotate
from .tiles import pointer
from .transposition import transpose

_SMALLEST_NORMAL, _LARGEST = np.float32(2.0**-126), np.finfo(np.float32).max
_INFINITE, _ONE_BFLOAT16, _UPPER_HALF = np.uint32(0x7F800000), np.uint32(0x10000), np.uint32(0xFFFF0000)
# The bits of 2 ** 64: smaller numbers stay finite when they are rotated.
_LARGE = np.uint32(0x5F800000)


NOT_FINITE = "infinite, not a number, or so large that sums of them are infinite"


class Coding(NamedTuple):
    """One call of `_encode` or `_decode`."""

    states: Any  # uint32 (float32 bits) or uint16 (bfloat16 bits), all memory from the first state to the last
    shift: int  # from these bits to those of a float32
    sequence_stride: int
    head_stride: int
    token_stride: int
    num_kv_heads: int
    dim: int
    records: Any  # uint8 [blocks, batch * num_kv_heads, bytes]
    bits: int
    inner: int
    lanes: int
    group: int
    transposed: bool
    rotation: int
    factors: Any  # float32 [num_kv_heads, dim], of each channel before it is rotated, or after it was rotated back
    share: float
    failures: Any  # int64 [1], counts blocks with numbers that are not finite


def encode_blocks(
    states: np.ndarray, layout: RecordLayout, share: float = 1.0, factors: np.ndarray | None = None
) -> np.ndarray:
    """
    Code whole blocks.

    Args:
        states: `[batch, num_kv_heads, blocks * 64, dim]`, float32, or uint16 for bfloat16 bits; the last axis
            contiguous.
        layout: of the records.
        share: of the range of a group that codes cover, around its middle; what is beyond gets the nearest code.
        factors: float32 `[num_kv_heads, dim]`: what channels are multiplied by, before they are rotated.

    Returns:
        uint8 `[blocks, batch * num_kv_heads, layout.num_bytes]`.

    Raises:
        ValueError: some of the states are infinite or not a number, or become so when they are rotated.
    """
    batch, heads, tokens, _ = states.shape
    records = np.empty((tokens // BLOCK, batch * heads, layout.num_bytes), np.uint8)
    if not records.size:
        return records
    call = coding_call(states, layout, records, factors, share)
    _encode(*team_of_kernels(), call)
    if call.failures[0]:
        raise ValueError(NOT_FINITE)
    return records


def decode_blocks(
    records: np.ndarray, layout: RecordLayout, states: np.ndarray, factors: np.ndarray | None = None
) -> None:
    """
    Write what coded blocks stand for.

    Args:
        records: `[blocks, batch * num_kv_heads, layout.num_bytes]`, contiguous.
        layout: of them.
        states: written, as `encode_blocks` takes them.
        factors: float32 `[num_kv_heads, dim]`: what channels are multiplied by, after they were rotated back.
    """
    if records.size:
        _decode(*team_of_kernels(), coding_call(states, layout, records, factors))


def coding_call(
    states: np.ndarray, layout: RecordLayout, records: np.ndarray, factors: np.ndarray | None, share: float = 1.0
) -> Coding:
    _, heads, _, dim = states.shape
    factors = np.ones((heads, dim), np.float32) if factors is None else factors
    assert factors.shape == (heads, dim)
    bits = states.view(np.uint32) if states.dtype == np.float32 else states
    strides = [stride // bits.itemsize for stride in bits.strides]
    assert strides[3] == 1
    # One kernel for any strides.
    span = 1 + sum((size - 1) * stride for size, stride in zip(bits.shape, strides, strict=True))
    return Coding(
        as_strided(bits, (span,), (bits.itemsize,)),
        0 if states.dtype == np.float32 else 16,
        *strides[:3],
        heads,
        dim,
        records,
        layout.bits,
        layout.inner,
        layout.lanes,
        layout.group,
        layout.transposed,
        layout.rotation,
        factors,
        share,
        np.zeros(1, np.int64),
    )


@jit
def _encode(parallel, team, threads, call):
    share_out(parallel, team, threads, call.records.shape[0] * call.records.shape[1], _encode_block, call)


@jit
def _decode(parallel, team, threads, call):
    share_out(parallel, team, threads, call.records.shape[0] * call.records.shape[1], _decode_block, call)


@jit_part
def in_words(index, bits):
    """The row of words, and the lowest bit in them, of the codes of an index of the inner axis."""
    half, place = index % 16 // 8, index % 8
    first_bit = (index // 16 * 8 + place) * bits
    return first_bit // 16, np.uint32(first_bit % 16 + half * 16)


@jit_part
def _place(block, head, call):
    """Where the states of one block of one head start."""
    sequence, kv_head = divmod(head, call.num_kv_heads)
    return sequence * call.sequence_stride + kv_head * call.head_stride + block * BLOCK * call.token_stride


@jit_inlined
def _run(address, count, one):
    """Some numbers of the type of `one`. A slice of an array would be counted, by atomic instructions."""
    return numba.carray(pointer(address, one), (count,))


@jit_inlined
def _states(first, call):
    """Those of a token, from one on."""
    one = call.states.dtype.type(0)
    return _run(call.states.ctypes.data + first * call.states.itemsize, call.dim, one)


@jit_part
def rotated_block(block, head, call):
    """
    The states of one block of one head as they are coded, `[64, dim]`, and whether all are finite.

    Rows are filled up with zeros to a multiple of 16.
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


@jit_part
def by_channel(tile):
    """A tile `[64, dim]`, filled up, as `[dim, 64]`, or the other way around."""
    rows, columns = tile.shape
    turned = np.empty((columns, rows), np.float32)
    transpose(tile.ctypes.data, rows, columns, turned.ctypes.data)
    return turned


@jit_part
def _encode_block(part, call):
    """Code one block of one head."""
    block, head = divmod(part, call.records.shape[1])
    bits, inner, lanes, dim = call.bits, call.inner, call.lanes, call.dim
    levels = np.float32((1 << bits) - 1)
    by_token, is_finite = rotated_block(block, head, call)
    if not is_finite:
        call.failures[0] += 1
    tile = by_channel(by_token) if call.transposed else by_token
    numbers_of_tile = tile.ctypes.data
    groups = (lanes + call.group - 1) // call.group
    filled_inner, filled_lanes = (dim, BLOCK) if call.transposed else (BLOCK, dim)
    words, scales, lows = _parts(call.records[block, head], bits, inner, lanes, groups)
    for row in range(words.shape[0]):
        for lane in range(lanes):
            words[row, lane] = 0
    for group in range(groups):
        for index in range(inner):
            scales[group, index] = lows[group, index] = 0
    for group in range(groups):
        start, end = group * call.group, min((group + 1) * call.group, filled_lanes)
        if start < end:
            for index in range(filled_inner):
                numbers = _run(numbers_of_tile + (index * tile.shape[1] + start) * 4, end - start, numba.float32(0))
                least, most = extremes(numbers)
                scale, low = scale_and_low(least, most, call.share, levels)
                scales[group, index], lows[group, index] = scale >> np.uint32(16), low >> np.uint32(16)
                word, position = in_words(index, bits)
                of_group = _run(words.ctypes.data + (word * lanes + start) * 4, end - start, numba.uint32(0))
                put_codes(numbers, as_number(scale), as_number(low), levels, of_group, position)


@jit_part
def _parts(record, bits, inner, lanes, groups):
    """The codes in a record, in words, `[inner * bits / 32, lanes]`, and its scales and lows, `[groups, inner]`."""
    first, second = inner * bits // 8 * lanes, groups * inner * 2
    words = record[:first].view(np.uint32).reshape(-1, lanes)
    scales = record[first : first + second].view(np.uint16).reshape(groups, inner)
    lows = record[first + second :].view(np.uint16).reshape(groups, inner)
    return words, scales, lows


@jit_finite
def extremes(numbers):
    """Of a group. Written out: of `min` and `max` no vectors are made."""
    least = most = numbers[0]
    for number in numbers:
        least = number if number < least else least
        most = number if number > most else most
    return least, most


@jit_finite
def put_codes(numbers, scale, low, levels, words, position):
    """Put the codes of a group into words at a position."""
    half = np.float32(0.5)
    half_low = low * half
    reciprocal = np.float32(2) / scale if scale > 0 else np.float32(0)
    for lane in range(numbers.size):
        code = (numbers[lane] * half - half_low) * reciprocal + half
        code = code if code > 0 else np.float32(0)
        code = code if code < levels else levels
        words[lane] |= np.uint32(np.uint32(np.int32(code)) << position)


@jit_part
def scale_and_low(least, most, share, levels):
    """Of a group, as the bits of float32."""
    if share < 1:
        part = np.float32((1 - share) / 2)
        cut = most * part - least * part
        least, most = least + cut, most - cut
    half = np.float32(0.5)
    low_bits = _rounded_down(least)
    low = as_number(low_bits)
    if most <= low:
        return np.uint32(0), low_bits
    # Divided first: the difference of two large numbers may be infinite.
    scale_bits = _rounded_up(max(most / levels - low / levels, _SMALLEST_NORMAL))
    if low * half + levels * (as_number(scale_bits) * half) > _LARGEST * half:
        scale_bits = np.uint32(scale_bits - _ONE_BFLOAT16)
    return scale_bits, low_bits


@jit_part
def as_number(bits):
    """The float32 of some bits."""
    return np.uint32(bits).view(np.float32)


@jit_part
def rounded_to_upper_half(bits):
    """The bits of the bfloat16 that is nearest to the float32 of some bits, of two the even one."""
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16


@jit_part
def _rounded_down(number):
    """The bits of the largest bfloat16 that is finite and not above a number, or of the lowest."""
    bits = np.float32(number).view(np.uint32)
    result = np.uint32(bits & _UPPER_HALF)
    if result != bits and number < 0:
        result = np.uint32(result + _ONE_BFLOAT16)
    return np.uint32(result - _ONE_BFLOAT16) if result & _INFINITE == _INFINITE else result


@jit_part
def _rounded_up(number):
    """The bits of the smallest bfloat16 that is finite and not below a number, or of the highest."""
    bits = _rounded_down(-number)
    return np.uint32(bits ^ np.uint32(0x80000000))


@jit_part
def _decode_block(part, call):
    """Write what one block of one head stands for."""
    block, head = divmod(part, call.records.shape[1])
    first_state = _place(block, head, call)
    bits, inner, lanes = call.bits, call.inner, call.lanes
    dim = call.dim
    filled_inner, filled_lanes = (dim, BLOCK) if call.transposed else (BLOCK, dim)
    groups = (lanes + call.group - 1) // call.group
    words, scales, lows = _parts(call.records[block, head], bits, inner, lanes, groups)
    mask = np.uint32((1 << bits) - 1)
    tile = np.zeros((inner, lanes), np.float32)
    for index in range(filled_inner):
        word, position = in_words(index, bits)
        for group in range(groups):
            scale = as_number(np.uint32(scales[group, index]) << np.uint32(16))
            low = as_number(np.uint32(lows[group, index]) << np.uint32(16))
            for lane in range(group * call.group, min((group + 1) * call.group, filled_lanes)):
                code = np.float32((words[word, lane] >> position) & mask)
                tile[index, lane] = low + scale * code
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
    """What codes states that kernels see as `element`, and decodes them."""
    return [(kernel, taking_states(element)) for kernel in (_encode, _decode)]


def taking_states(element: np.dtype) -> tuple[Any, ...]:
    """The types that a kernel is given with a `Coding` of states that kernels see as `element`."""
    number, record_bytes = numba.int64, numba.uint8[:, :, ::1]
    states = numba.uint16[::1] if element == np.uint16 else numba.uint32[::1]
    kinds = {
        "states": states,
        "records": record_bytes,
        "transposed": numba.boolean,
        "factors": numba.float32[:, ::1],
        "share": numba.float64,
        "failures": numba.int64[::1],
    }
    call = numba.types.NamedTuple([kinds.get(field, number) for field in Coding._fields], Coding)
    return number, number, number, call
