"""
Attention of many queries over blocks in host memory: a prompt, a chunk of one, drafts to verify, beams.

Attention of few queries (`attention`) is bound by memory; attention of many queries is bound by arithmetic. Hundreds of
rows of one KV head take all blocks that one of them sees, with a running maximum (FlashAttention, arXiv:2205.14135).
Each block, float or quantized, becomes an operand once for all these rows, see `block_operands`.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import boolean, float64, int64, types

from ..blocks import BLOCK, value_width
from ..quantized.quantization import rounded_to_upper_half
from ..vector.calls import kernel_call, taking
from ..vector.compiled import Needed, jit, jit_function, jit_inlined
from ..vector.parallel import split_work_to
from ..vector.rotation import rotate
from ..vector.tiles import LOG2_E, ROWS, pointer, score_tile, softmax_tile, tile_columns, weigh_narrow_tile, weigh_tile
from ..vector.vector_ir import CACHE_LINE
from .attention import LOWEST, power_of_two
from .block_operands import dequantized, unpacked_or_packed
from .packed_tiles import (
    is_bfloat16,
    is_float32,
    is_packed,
    score_packed_tile,
    softmax_packed_tile,
    weigh_narrow_packed_tile,
    weigh_packed_tile,
)

_LOG2_E = np.float32(LOG2_E)


_PAIR, _STRIDES, _SHAPE = (types.UniTuple(int64, count) for count in (2, 3, 4))

# One call of `attend_prefill`; `prefill.attend_many` describes the arguments. Strides are in bytes; pairs are of keys
# and of values. The call holds addresses instead of arrays: an array is counted, by atomic instructions, whenever one
# is taken out of the call, and threads then wait for each other.
PrefillCall = kernel_call(
    "PrefillCall",
    __name__,
    {
        "element": numba.from_dtype,  # 0, of the type of keys and values
        "query": int64,  # address of numbers: bfloat16 where keys are, float32 otherwise
        "query_strides": _STRIDES,  # from a sequence, a head and a token to the next one
        "out": int64,  # address, written
        "out_strides": _STRIDES,
        "has_half_out": boolean,  # whether `out` is bfloat16, not float32
        "lse": int64,  # address of float32 [batch, query heads, query_length], written
        "keys": int64,  # address of blocks, [float blocks, heads, key_dim, BLOCK]
        "values": int64,  # address of blocks, [float blocks, heads, BLOCK, width]
        "block_bytes": _PAIR,
        "num_tokens": int64,
        "batch": int64,
        "num_kv_heads": int64,
        "group": int64,
        "query_length": int64,
        "key_dim": int64,
        "value_dim": int64,
        "width": int64,
        "scale": float64,
        "seen": int64,  # address of int64 [batch, query heads, query_length, 2]; any of the first three may be 1
        "seen_shape": _SHAPE,
        "visible": int64,  # address of uint8 [batch, query heads, query_length, tokens], any may be 1; 0 for none
        "visible_shape": _SHAPE,
        "bias": int64,  # address of float32, shaped as `visible` may be; 0 for none
        "bias_shape": _SHAPE,
        "packed": _PAIR,  # addresses of packed blocks, [quantized blocks, heads, bytes]
        "packed_bytes": _PAIR,  # of one packed block
        "first_quantized": int64,  # number of blocks in full precision before the quantized ones
        "quantized_blocks": int64,
        "bits": _PAIR,
        "groups": _PAIR,
        "rotations": _PAIR,
        "query_factors": int64,  # address of float32 [num_kv_heads, key_dim]; 0 for none
        "rotation_matrix": int64,  # address of float32 [num_kv_heads, value_dim, value_dim]; 0 for none
        "rows_at_once": int64,
        "scratch": int64,  # address of the threads' memory
        "scratch_bytes": int64,  # memory of one thread
    },
)


class _Rows(NamedTuple):
    """Memory of a piece: some rows of a head. Numbers are addresses; pairs are of full precision and of quantized."""

    head: int
    first: int
    count: int
    padded: int  # count, up to whole tiles
    inner: int  # padded width of a key
    width: int  # padded width of a value
    query: tuple[int, int]  # operands
    query_bytes: int  # bytes of a row of them
    partial: tuple[int, int]  # float32 [padded, width]
    maxima: tuple[int, int]  # float32 [padded]
    sums: tuple[int, int]
    seen: int  # int64 [padded, 2]
    keys: int  # operands
    values: int
    scores: int  # float32 [ROWS, BLOCK]
    corrections: int  # float32 [ROWS]
    numbers: int  # float32 [inner]
    factor: Any  # float32


@jit
def attend_prefill(team, call):
    """Attend as `call` says, on several threads as `split_work` says."""
    pieces = (call.group * call.query_length + call.rows_at_once - 1) // call.rows_at_once
    split_work_to(team, pieces * call.batch * call.num_kv_heads, _attend_piece, call)


@jit_function
def _attend_piece(piece, thread, call):
    """
    Attend with one piece: some rows of a head.

    Pieces of one head follow each other, so that its blocks stay in a cache of the processor. The last rows of a head
    see most tokens; they come first, so that all threads end at about the same time.
    """
    rows = call.group * call.query_length
    pieces = (rows + call.rows_at_once - 1) // call.rows_at_once
    first = (pieces - 1 - piece % pieces) * call.rows_at_once
    address = call.scratch + thread * call.scratch_bytes
    work = _rows_of(piece // pieces, first, min(call.rows_at_once, rows - first), address, call)
    _start(work, call)
    first, end = _seen_range(work)
    for block in range(first // BLOCK, (end + BLOCK - 1) // BLOCK):
        _attend_block(block, work, call)
    for row in range(work.count):
        _finish(row, work, call)


@jit_function
def _aligned(count):
    return (count + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


def scratch_bytes(rows_at_once: int, key_dim: int, width: int) -> int:
    """Bytes that `_rows_of` needs, in whole cache lines."""
    inner, padded = value_width(key_dim), -(-rows_at_once // ROWS) * ROWS
    of_rows = [padded * inner * 4] * 2 + [padded * width * 4] * 2 + [padded * 4] * 4 + [padded * 16]
    of_block = [inner * BLOCK * 4, BLOCK * width * 4, ROWS * BLOCK * 4, ROWS * 4, inner * 4]
    return sum(-(-size // CACHE_LINE) * CACHE_LINE for size in [*of_rows, *of_block])


@jit_function
def _rows_of(head, first, count, address, call):
    """Lay out a thread's memory for some rows; each array starts at a cache line."""
    padded, width = (count + ROWS - 1) // ROWS * ROWS, call.width
    inner = (call.key_dim + 15) // 16 * 16
    query_bytes = inner * 2 if is_packed(call.element) else inner * 4
    query = address
    rotated = query + _aligned(padded * query_bytes)
    partial = rotated + _aligned(padded * query_bytes)
    of_codes = partial + _aligned(padded * width * 4)
    maxima = of_codes + _aligned(padded * width * 4)
    numbers = _aligned(padded * 4)
    seen = maxima + 4 * numbers
    keys = seen + _aligned(padded * 16)
    values = keys + inner * BLOCK * 4
    scores = values + BLOCK * width * 4
    corrections = scores + ROWS * BLOCK * 4
    return _Rows(
        head=head,
        first=first,
        count=count,
        padded=padded,
        inner=inner,
        width=width,
        query=(query, rotated),
        query_bytes=query_bytes,
        partial=(partial, of_codes),
        maxima=(maxima, maxima + numbers),
        sums=(maxima + 2 * numbers, maxima + 3 * numbers),
        seen=seen,
        keys=keys,
        values=values,
        scores=scores,
        corrections=corrections,
        numbers=corrections + CACHE_LINE,
        factor=numba.float32(call.scale * LOG2_E),
    )


@jit_function
def _floats(address, count):
    return numba.carray(pointer(address, numba.float32(0)), (count,))


@jit_function
def _place(row, work, call):
    """The sequence, the query head and the index of the query of a row."""
    number = work.first + row
    head = work.head % call.num_kv_heads * call.group + number // call.query_length
    return work.head // call.num_kv_heads, head, number % call.query_length


@jit_inlined
def _offset(sequence, head, index, strides):
    """Bytes from the first query to another."""
    return sequence * strides[0] + head * strides[1] + index * strides[2]


@jit_inlined
def _row_of(sequence, head, index, shape):
    """Index of a query's row in `[batch, query heads, query_length, row]`, where any of the first three may be 1."""
    row = (sequence % shape[0] * shape[1] + head % shape[1]) * shape[2] + index % shape[2]
    return row * shape[3]


@jit_function
def _start(work, call):
    """Write the queries as operands and which tokens they see; reset maxima, sums and partial results."""
    seen = numba.carray(pointer(work.seen, numba.int64(0)), (work.padded, 2))
    for row in range(work.padded):
        sequence, head, index = _place(min(row, work.count - 1), work, call)
        place = _row_of(sequence, head, index, call.seen_shape)
        of_row = numba.carray(pointer(call.seen + place * 8, numba.int64(0)), (2,))
        seen[row, 0], seen[row, 1] = of_row[0], of_row[1]
    for side in range(2 if call.quantized_blocks else 1):
        maxima, sums = _floats(work.maxima[side], work.padded), _floats(work.sums[side], work.padded)
        partial = _floats(work.partial[side], work.padded * work.width)
        for row in range(work.padded):
            maxima[row], sums[row] = -np.inf, 0
        for index in range(partial.size):
            partial[index] = 0
    numbers = _floats(work.numbers, work.inner)
    for row in range(work.padded):
        sequence, head, index = _place(min(row, work.count - 1), work, call)
        source = call.query + _offset(sequence, head, index, call.query_strides)
        if is_packed(call.element):
            _copy_halves(source, call.key_dim, work.query[0] + row * work.query_bytes, work.inner)
        else:
            operand = _floats(work.query[0] + row * work.query_bytes, work.inner)
            _read_query(source, call.element, call.key_dim, operand)
        if call.quantized_blocks:
            _read_query(source, call.element, call.key_dim, numbers)
            if call.query_factors:
                of_head = work.head % call.num_kv_heads * call.key_dim
                factors = _floats(call.query_factors + of_head * 4, call.key_dim)
                for d in range(call.key_dim):
                    numbers[d] *= factors[d]
            rotate(work.numbers, call.key_dim, call.rotations[0])
            _write_query(numbers, row, work.query[1], work, call)


@jit_function
def _copy_halves(source, dim, target, filled):
    """Copy `dim` numbers of 16 bits, and write zeros up to `filled`."""
    halves = numba.carray(pointer(source, numba.uint16(0)), (dim,))
    copied = numba.carray(pointer(target, numba.uint16(0)), (filled,))
    for d in range(dim):
        copied[d] = halves[d]
    for d in range(dim, filled):
        copied[d] = 0


@jit_function
def _read_query(source, element, dim, numbers):
    """Copy a query to float32, with zeros after it."""
    if is_bfloat16(element):
        halves = numba.carray(pointer(source, numba.uint16(0)), (dim,))
        bits = numba.carray(pointer(numbers.ctypes.data, numba.uint32(0)), (dim,))
        for d in range(dim):
            bits[d] = np.uint32(halves[d]) << np.uint32(16)
    else:
        floats = _floats(source, dim)
        for d in range(dim):
            numbers[d] = floats[d]
    for d in range(dim, numbers.size):
        numbers[d] = 0


@jit_function
def _write_query(numbers, row, operand, work, call):
    """Write a row of an operand of queries."""
    target = operand + row * work.query_bytes
    if is_packed(call.element):
        _write_half(numbers, target)
    else:
        floats = _floats(target, numbers.size)
        for d in range(numbers.size):
            floats[d] = numbers[d]


@jit_function
def _write_half(numbers, target):
    """Write float32 as the nearest bfloat16. NaN stays NaN."""
    halves = numba.carray(pointer(target, numba.uint16(0)), (numbers.size,))
    bits = numba.carray(pointer(numbers.ctypes.data, numba.uint32(0)), (numbers.size,))
    for d in range(numbers.size):
        rounded = np.uint32(rounded_to_upper_half(bits[d]))
        halves[d] = np.uint16(0x7FC0) if np.isnan(numbers[d]) else np.uint16(rounded)


@jit_function
def _seen_range(work):
    """The first token that a row sees, and the one after the last."""
    seen = numba.carray(pointer(work.seen, numba.int64(0)), (work.padded, 2))
    first, end = seen[0, 0], seen[0, 1]
    for row in range(1, work.count):
        first, end = min(first, seen[row, 0]), max(end, seen[row, 1])
    return first, end


@jit_function
def _attend_block(block, work, call):
    """Attend to a block with all rows of the piece."""
    element, heads = call.element, call.batch * call.num_kv_heads
    start = block * BLOCK
    tokens = min(BLOCK, call.num_tokens - start)
    keys, values, quantized = work.keys, work.values, block - call.first_quantized
    if 0 <= quantized < call.quantized_blocks:
        side, inner = 1, work.inner
        item = quantized * heads + work.head
        keys_from = call.packed[0] + item * call.packed_bytes[0]
        values_from = call.packed[1] + item * call.packed_bytes[1]
        dequantized(element, keys_from, call.bits[0], inner, BLOCK, call.groups[0], keys)
        dequantized(element, values_from, call.bits[1], BLOCK, work.width, call.groups[1], values)
    else:
        side, inner = 0, (call.key_dim + 1) // 2 * 2
        item = (block if quantized < 0 else block - call.quantized_blocks) * heads + work.head
        keys_from, values_from = call.keys + item * call.block_bytes[0], call.values + item * call.block_bytes[1]
        if is_float32(element):
            keys, values, inner = keys_from, values_from, call.key_dim
        else:
            unpacked_or_packed(element, keys_from, call.key_dim, BLOCK, inner, keys)
            unpacked_or_packed(element, values_from, tokens, work.width, (tokens + 1) // 2 * 2, values)
    for row in range(0, work.padded, ROWS):
        earliest_start, latest_start, earliest_end, latest_end = _borders(row, work)
        if earliest_start < start + BLOCK and latest_end > start:
            hides = latest_start > start or earliest_end < start + BLOCK
            is_masked = hides or call.visible != 0 or call.bias != 0
            _attend_tile(row, start, tokens, side, inner, keys, values, is_masked, work, call)


@jit_inlined
def _borders(first, work):
    """The earliest and the latest start, the earliest and the latest end of the ranges that four rows see."""
    seen = numba.carray(pointer(work.seen, numba.int64(0)), (work.padded, 2))
    earliest_start, earliest_end = latest_start, latest_end = seen[first, 0], seen[first, 1]
    for row in range(first + 1, first + ROWS):
        earliest_start, latest_start = min(earliest_start, seen[row, 0]), max(latest_start, seen[row, 0])
        earliest_end, latest_end = min(earliest_end, seen[row, 1]), max(latest_end, seen[row, 1])
    return earliest_start, latest_start, earliest_end, latest_end


@jit_inlined
def _attend_tile(row, start, tokens, side, inner, keys, values, is_masked, work, call):
    """Attend to a block's operands with four rows."""
    query, target = work.query[side] + row * work.query_bytes, work.partial[side] + row * work.width * 4
    maxima, sums, corrections = work.maxima[side] + row * 4, work.sums[side] + row * 4, work.corrections
    column, one, factor = 0, numba.float32(0), work.factor
    if is_packed(call.element):
        score_packed_tile(query, work.query_bytes, keys, inner // 2, work.scores)
        if is_masked:
            factor = _mask(row, start, tokens, work, call)
        softmax_packed_tile(work.scores, factor, maxima, sums, corrections)
        pairs = (tokens + 1) // 2
        while column + tile_columns() <= work.width:
            weigh_packed_tile(work.scores, values, pairs, work.width, column, corrections, target)
            column += tile_columns()
        while column < work.width:
            weigh_narrow_packed_tile(work.scores, values, pairs, work.width, column, corrections, target)
            column += 16
        return
    for at in range(0, BLOCK, tile_columns()):
        score_tile(one, query, work.query_bytes, keys, inner, work.scores, at, keys)
    if is_masked:
        factor = _mask(row, start, tokens, work, call)
    softmax_tile(work.scores, factor, maxima, sums, corrections)
    while column + tile_columns() <= work.width:
        weigh_tile(one, work.scores, values, tokens, work.width, column, corrections, target, values)
        column += tile_columns()
    while column < work.width:
        weigh_narrow_tile(one, work.scores, values, tokens, work.width, column, corrections, target, values)
        column += 16


@jit_function
def _mask(first, start, tokens, work, call):
    """
    Multiply the scores of four rows by the factor, add the bias, and hide the tokens that a query does not see.

    Minus infinity is added, as torch adds a mask, so that a NaN score stays NaN. Returns 1, the factor that is left.
    """
    scores = numba.carray(pointer(work.scores, numba.float32(0)), (ROWS, BLOCK))
    seen = numba.carray(pointer(work.seen, numba.int64(0)), (work.padded, 2))
    for tile_row in range(ROWS):
        row = first + tile_row
        sequence, head, index = _place(min(row, work.count - 1), work, call)
        begin = min(max(seen[row, 0] - start, 0), tokens)
        end = min(max(seen[row, 1] - start, begin), tokens)
        for token in range(tokens):
            scores[tile_row, token] *= work.factor
        if call.bias:
            bias = _floats(call.bias + (_row_of(sequence, head, index, call.bias_shape) + start) * 4, tokens)
            for token in range(begin, end):
                added = bias[token]
                biased = scores[tile_row, token] + added * _LOG2_E
                scores[tile_row, token] = biased if added == -np.inf else max(biased, LOWEST)
        if call.visible:
            place = call.visible + _row_of(sequence, head, index, call.visible_shape) + start
            visible = numba.carray(pointer(place, numba.uint8(0)), (tokens,))
            for token in range(begin, end):
                if visible[token] == 0:
                    scores[tile_row, token] += -np.inf
        for token in range(begin):
            scores[tile_row, token] += -np.inf
        for token in range(end, tokens):
            scores[tile_row, token] += -np.inf
        for token in range(tokens, BLOCK):
            scores[tile_row, token] = -np.inf
    return numba.float32(1)


@jit_function
def _finish(row, work, call):
    """Write the output and the log-sum-exp of a row."""
    merged, highest = _floats(work.partial[0] + row * work.width * 4, work.width), _floats(work.maxima[0], row + 1)[row]
    total = np.float64(_floats(work.sums[0], row + 1)[row])
    if call.quantized_blocks:
        highest, total = _merge_codes(row, merged, highest, total, work, call)
    sequence, head, index = _place(row, work, call)
    base = 0.0 if highest == -np.inf else np.float64(highest)
    place = (sequence * call.num_kv_heads * call.group + head) * call.query_length + index
    _floats(call.lse, place + 1)[place] = base / LOG2_E + np.log(total)
    if total != 0:
        reciprocal = np.float32(1 / total)
        for column in range(work.width):
            merged[column] *= reciprocal
    target = call.out + _offset(sequence, head, index, call.out_strides)
    if call.has_half_out:
        _write_half(merged[: call.value_dim], target)
    else:
        out = _floats(target, call.value_dim)
        for column in range(call.value_dim):
            out[column] = merged[column]


@jit_function
def _merge_codes(row, merged, highest, total, work, call):
    """Merge a row's partial results of quantized blocks into those of full precision. Returns maximum and sum."""
    of_codes = _floats(work.maxima[1], row + 1)[row]
    common = of_codes if of_codes > highest else highest
    base = 0.0 if common == -np.inf else np.float64(common)
    weight = np.float32(power_of_two(np.float64(highest) - base))
    weight_of_codes = np.float32(power_of_two(np.float64(of_codes) - base))
    quantized = _unrotated(work.partial[1] + row * work.width * 4, work, call)
    for column in range(work.width):
        merged[column] = weight * merged[column] + weight_of_codes * quantized[column]
    return common, weight * total + weight_of_codes * _floats(work.sums[1], row + 1)[row]


@jit_function
def _unrotated(address, work, call):
    """Rotate a partial result of quantized values back, and multiply it by the rotation matrix."""
    rotate(address, call.value_dim, call.rotations[1])
    numbers = _floats(address, work.width)
    if not call.rotation_matrix:
        return numbers
    size = call.value_dim * call.value_dim
    rotation_matrix = _floats(call.rotation_matrix + work.head % call.num_kv_heads * size * 4, size)
    mixed = np.zeros(work.width, np.float32)
    for source in range(call.value_dim):
        for column in range(call.value_dim):
            mixed[column] += numbers[source] * rotation_matrix[source * call.value_dim + column]
    for column in range(call.value_dim):
        numbers[column] = mixed[column]
    return numbers


def prefill_kernels(element: np.dtype) -> list[Needed]:
    """The kernel by which many queries attend to blocks of `element` and to quantized blocks beside them."""
    return [(attend_prefill, taking(PrefillCall, element))]
