"""
Attention of many queries over blocks in host memory: a prompt, a chunk of one, drafts to verify, beams.

What `attention` does for a few rows is bound by memory; this is bound by arithmetic. Some hundred rows that share a KV
head go through all blocks that one of them sees, with a running maximum (FlashAttention, arXiv:2205.14135). Each block,
of floats or codes, becomes an operand once for all these rows, see `block_operands`.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from .attention import LOWEST, power_of_two
from .block_operands import dequantized, unpacked_or_packed
from .blocks import BLOCK, value_width
from .coding import rounded_to_upper_half
from .compiled import Needed, jit, jit_inlined, jit_part
from .packed_tiles import (
    is_bfloat16,
    is_float32,
    is_packed,
    score_packed_tile,
    softmax_packed_tile,
    weigh_narrow_packed_tile,
    weigh_packed_tile,
)
from .parallel import share_out_to
from .rotation import rotate
from .tiles import LOG2_E, ROWS, pointer, score_tile, softmax_tile, tile_columns, weigh_narrow_tile, weigh_tile
from .vector_ir import CACHE_LINE

_LOG2_E = np.float32(LOG2_E)


class PrefillCall(NamedTuple):
    """
    One call of `attend_prefill`; `prefill.attend_many` says what is in it.

    Addresses instead of arrays: these are counted, by atomic instructions, whenever one is taken out of the call, and
    threads then wait for each other. Strides are bytes.
    """

    element: Any  # 0, of the type of keys and values: float32, uint16 or int16
    query: int  # address of numbers: bfloat16 where keys are, float32 otherwise
    query_strides: tuple[int, int, int]  # of a sequence, a head and a token
    out: int  # address, written
    out_strides: tuple[int, int, int]
    has_half_out: bool  # bfloat16, not float32
    lse: int  # address of float32 [batch, query heads, query_length], written
    keys: int  # address of blocks, [float blocks, heads, key_dim, 64]
    values: int  # likewise [float blocks, heads, 64, width]
    block_bytes: tuple[int, int]  # of one block of keys and one of values
    num_tokens: int
    batch: int
    num_kv_heads: int
    group: int
    query_length: int
    key_dim: int
    value_dim: int
    width: int
    scale: float
    seen: int  # address of int64 [batch, query heads, query_length, 2], where any of the first three may be 1
    seen_shape: tuple[int, int, int, int]
    visible: int  # address of uint8 [batch, query heads, query_length, tokens] likewise; 0 for none
    visible_shape: tuple[int, int, int, int]
    bias: int  # address of float32 likewise
    bias_shape: tuple[int, int, int, int]
    records: tuple[int, int]  # addresses of records of keys and of values, [coded blocks, heads, bytes]
    record_bytes: tuple[int, int]
    first_coded: int  # blocks in full precision before the coded ones
    coded_blocks: int
    bits: tuple[int, int]
    groups: tuple[int, int]
    rotations: tuple[int, int]
    query_factors: int  # address of float32 [num_kv_heads, key_dim]; 0 for none
    mixing: int  # address of float32 [num_kv_heads, value_dim, value_dim]; 0 for none
    rows_at_once: int
    scratch: int  # address of memory for each thread
    scratch_bytes: int  # for one


class _Rows(NamedTuple):
    """Addresses of what some rows of a head work on; of pairs those in full precision come first."""

    head: int
    first: int
    count: int
    padded: int  # to whole tiles
    inner: int  # of a key, filled up
    width: int  # of a value, filled up
    query: tuple[int, int]  # rows of the operand
    query_bytes: int  # of a row
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
def attend_prefill(parallel, team, threads, call):
    """Attend as `call` says, on several threads as `share_out` says."""
    pieces = (call.group * call.query_length + call.rows_at_once - 1) // call.rows_at_once
    share_out_to(parallel, team, threads, pieces * call.batch * call.num_kv_heads, _attend_piece, call)


@jit_part
def _attend_piece(piece, thread, call):
    """
    Some rows of a head.

    One head after the other, whose blocks then stay in a cache of the processor. Its last rows, which see most, come
    first: then threads end together.
    """
    rows = call.group * call.query_length
    pieces = (rows + call.rows_at_once - 1) // call.rows_at_once
    first = (pieces - 1 - piece % pieces) * call.rows_at_once
    address = call.scratch + thread * call.scratch_bytes
    work = _rows_of(piece // pieces, first, min(call.rows_at_once, rows - first), address, call)
    _start(work, call)
    # Hidden blocks at the front, too: what is not finite there is to be noticed, as with a mask of torch.
    for block in range((_end(work) + BLOCK - 1) // BLOCK):
        _attend_block(block, work, call)
    for row in range(work.count):
        _finish(row, work, call)


@jit_part
def _aligned(count):
    return (count + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


def scratch_bytes(rows_at_once: int, key_dim: int, width: int) -> int:
    """What `_rows_of` takes, in whole cache lines."""
    inner, padded = value_width(key_dim), -(-rows_at_once // ROWS) * ROWS
    of_rows = [padded * inner * 4] * 2 + [padded * width * 4] * 2 + [padded * 4] * 4 + [padded * 16]
    of_block = [inner * BLOCK * 4, BLOCK * width * 4, ROWS * BLOCK * 4, ROWS * 4, inner * 4]
    return sum(-(-size // CACHE_LINE) * CACHE_LINE for size in [*of_rows, *of_block])


@jit_part
def _rows_of(head, first, count, address, call):
    """Memory for some rows, one piece after the other from a cache line's start on."""
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
        head,
        first,
        count,
        padded,
        inner,
        width,
        (query, rotated),
        query_bytes,
        (partial, of_codes),
        (maxima, maxima + numbers),
        (maxima + 2 * numbers, maxima + 3 * numbers),
        seen,
        keys,
        values,
        scores,
        corrections,
        corrections + CACHE_LINE,
        numba.float32(call.scale * LOG2_E),
    )


@jit_part
def _floats(address, count):
    return numba.carray(pointer(address, numba.float32(0)), (count,))


@jit_part
def _place(row, work, call):
    """The sequence, the query head and the query of a row."""
    number = work.first + row
    head = work.head % call.num_kv_heads * call.group + number // call.query_length
    return work.head // call.num_kv_heads, head, number % call.query_length


@jit_inlined
def _offset(sequence, head, index, strides):
    """Bytes from the first numbers to those of a query."""
    return sequence * strides[0] + head * strides[1] + index * strides[2]


@jit_inlined
def _row_of(sequence, head, index, shape):
    """Where the row of a query starts, `[batch, query heads, query_length, row]`, any of the first three may be 1."""
    row = (sequence % shape[0] * shape[1] + head % shape[1]) * shape[2] + index % shape[2]
    return row * shape[3]


@jit_part
def _start(work, call):
    """Write the queries as operands, which tokens they see, and that nothing is seen yet."""
    seen = numba.carray(pointer(work.seen, numba.int64(0)), (work.padded, 2))
    for row in range(work.padded):
        sequence, head, index = _place(min(row, work.count - 1), work, call)
        place = _row_of(sequence, head, index, call.seen_shape)
        of_row = numba.carray(pointer(call.seen + place * 8, numba.int64(0)), (2,))
        seen[row, 0], seen[row, 1] = of_row[0], of_row[1]
    for side in range(2 if call.coded_blocks else 1):
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
        if call.coded_blocks:
            _read_query(source, call.element, call.key_dim, numbers)
            if call.query_factors:
                of_head = work.head % call.num_kv_heads * call.key_dim
                factors = _floats(call.query_factors + of_head * 4, call.key_dim)
                for d in range(call.key_dim):
                    numbers[d] *= factors[d]
            rotate(work.numbers, call.key_dim, call.rotations[0])
            _write_query(numbers, row, work.query[1], work, call)


@jit_part
def _copy_halves(source, dim, target, filled):
    """Numbers of 16 bits, with zeros after them."""
    halves = numba.carray(pointer(source, numba.uint16(0)), (dim,))
    copied = numba.carray(pointer(target, numba.uint16(0)), (filled,))
    for d in range(dim):
        copied[d] = halves[d]
    for d in range(dim, filled):
        copied[d] = 0


@jit_part
def _read_query(source, element, dim, numbers):
    """A query as float32; what fills it up becomes zero."""
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


@jit_part
def _write_query(numbers, row, operand, work, call):
    """A query as an operand."""
    target = operand + row * work.query_bytes
    if is_packed(call.element):
        _write_half(numbers, target)
    else:
        floats = _floats(target, numbers.size)
        for d in range(numbers.size):
            floats[d] = numbers[d]


@jit_part
def _write_half(numbers, target):
    """Float32 as bfloat16. What is not a number stays so."""
    halves = numba.carray(pointer(target, numba.uint16(0)), (numbers.size,))
    bits = numba.carray(pointer(numbers.ctypes.data, numba.uint32(0)), (numbers.size,))
    for d in range(numbers.size):
        rounded = np.uint32(rounded_to_upper_half(bits[d]))
        halves[d] = np.uint16(0x7FC0) if np.isnan(numbers[d]) else np.uint16(rounded)


@jit_part
def _end(work):
    """The token after the last one that a row sees."""
    seen = numba.carray(pointer(work.seen, numba.int64(0)), (work.padded, 2))
    end = seen[0, 1]
    for row in range(1, work.count):
        end = max(end, seen[row, 1])
    return end


@jit_part
def _attend_block(block, work, call):
    """Attend to a block with all rows."""
    element, heads = call.element, call.batch * call.num_kv_heads
    start = block * BLOCK
    tokens = min(BLOCK, call.num_tokens - start)
    keys, values, coded = work.keys, work.values, block - call.first_coded
    if 0 <= coded < call.coded_blocks:
        side, inner = 1, work.inner
        item = coded * heads + work.head
        keys_from = call.records[0] + item * call.record_bytes[0]
        values_from = call.records[1] + item * call.record_bytes[1]
        dequantized(element, keys_from, call.bits[0], inner, BLOCK, call.groups[0], keys)
        dequantized(element, values_from, call.bits[1], BLOCK, work.width, call.groups[1], values)
    else:
        side, inner = 0, (call.key_dim + 1) // 2 * 2
        item = (block if coded < 0 else block - call.coded_blocks) * heads + work.head
        keys_from, values_from = call.keys + item * call.block_bytes[0], call.values + item * call.block_bytes[1]
        if is_float32(element):
            keys, values, inner = keys_from, values_from, call.key_dim
        else:
            unpacked_or_packed(element, keys_from, call.key_dim, BLOCK, inner, keys)
            unpacked_or_packed(element, values_from, tokens, work.width, (tokens + 1) // 2 * 2, values)
    for row in range(0, work.padded, ROWS):
        latest_start, earliest_end, latest_end = _borders(row, work)
        if latest_end > start:
            hides = latest_start > start or earliest_end < start + BLOCK
            is_masked = hides or call.visible != 0 or call.bias != 0
            _attend_tile(row, start, tokens, side, inner, keys, values, is_masked, work, call)


@jit_inlined
def _borders(first, work):
    """Of what four rows see: the latest start, the earliest and the latest end."""
    seen = numba.carray(pointer(work.seen, numba.int64(0)), (work.padded, 2))
    latest_start, earliest_end, latest_end = seen[first, 0], seen[first, 1], seen[first, 1]
    for row in range(first + 1, first + ROWS):
        latest_start = max(latest_start, seen[row, 0])
        earliest_end, latest_end = min(earliest_end, seen[row, 1]), max(latest_end, seen[row, 1])
    return latest_start, earliest_end, latest_end


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


@jit_part
def _mask(first, start, tokens, work, call):
    """
    Multiply the scores of four rows by the factor, add the bias, and minus infinity where a query does not see a token.

    Added, as torch adds a mask, so that a score that is not a number stays one. Returns what is left to multiply by.
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


@jit_part
def _finish(row, work, call):
    """Write what a row has found."""
    merged, highest = _floats(work.partial[0] + row * work.width * 4, work.width), _floats(work.maxima[0], row + 1)[row]
    total = np.float64(_floats(work.sums[0], row + 1)[row])
    if call.coded_blocks:
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


@jit_part
def _merge_codes(row, merged, highest, total, work, call):
    """Add what a row has found in codes to what it has found in full precision; returns the maximum and the sum."""
    of_codes = _floats(work.maxima[1], row + 1)[row]
    common = of_codes if of_codes > highest else highest
    base = 0.0 if common == -np.inf else np.float64(common)
    weight = np.float32(power_of_two(np.float64(highest) - base))
    weight_of_codes = np.float32(power_of_two(np.float64(of_codes) - base))
    coded = _unrotated(work.partial[1] + row * work.width * 4, work, call)
    for column in range(work.width):
        merged[column] = weight * merged[column] + weight_of_codes * coded[column]
    return common, weight * total + weight_of_codes * _floats(work.sums[1], row + 1)[row]


@jit_part
def _unrotated(address, work, call):
    """What is summed up of coded values, as sums of the values themselves."""
    rotate(address, call.value_dim, call.rotations[1])
    numbers = _floats(address, work.width)
    if not call.mixing:
        return numbers
    size = call.value_dim * call.value_dim
    mixing = _floats(call.mixing + work.head % call.num_kv_heads * size * 4, size)
    mixed = np.zeros(work.width, np.float32)
    for source in range(call.value_dim):
        for column in range(call.value_dim):
            mixed[column] += numbers[source] * mixing[source * call.value_dim + column]
    for column in range(call.value_dim):
        numbers[column] = mixed[column]
    return numbers


def prefill_kernels(element: np.dtype) -> list[Needed]:
    """What many queries attend to blocks of `element` with, and to codes beside them."""
    number = numba.int64
    kinds = {"element": numba.from_dtype(element), "has_half_out": numba.boolean, "scale": numba.float64}
    for field in PrefillCall._fields:
        if field.endswith("_strides"):
            kinds[field] = numba.types.UniTuple(number, 3)
        elif field.endswith("_shape"):
            kinds[field] = numba.types.UniTuple(number, 4)
        elif field in ("block_bytes", "records", "record_bytes", "bits", "groups", "rotations"):
            kinds[field] = numba.types.UniTuple(number, 2)
    call = numba.types.NamedTuple([kinds.get(field, number) for field in PrefillCall._fields], PrefillCall)
    return [(attend_prefill, (number, number, number, call))]
