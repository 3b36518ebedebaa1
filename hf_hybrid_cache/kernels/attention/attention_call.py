"""A call of attention: its description, the rows of queries, the mask, and the merge of results."""

import math
from typing import NamedTuple

import numba
import numpy as np

from ..forms.blocks import PackedLayout
from ..vector.compiled import jit_function, jit_inlined
from ..vector.intrinsics import call_at
from ..vector.numbers_at import (
    Numbers,
    array_at,
    as_double,
    bfloat16_at,
    floats_at,
    integers_at,
    load_numbers,
    store_numbers,
)
from ..vector.rotation import rotate, rotate_back
from ..vector.tiles import ROWS
from ..vector.vector_ir import BLOCK, LOG2_E

# A mask may add the lowest finite float32. Times log2(e) it would be infinite, and a row of only such scores empty.
_LOWEST, _LOG2_E = np.float32(-3e38), np.float32(LOG2_E)
_LN_2 = math.log(2)

# The coefficients of tanh, https://gitlab.com/libeigen/eigen, `ptanh_float`; the result is 1 from the end on.
_TANH_END = np.float32(7.90531110763549805)
_ODD_1, _ODD_3, _ODD_5 = (
    np.float32(4.89352455891786e-03),
    np.float32(6.37261928875436e-04),
    np.float32(1.48572235717979e-05),
)
_ODD_7, _ODD_9 = np.float32(5.12229709037114e-08), np.float32(-8.60467152213735e-11)
_ODD_11, _ODD_13 = np.float32(2.00018790482477e-13), np.float32(-2.76076847742355e-16)
_EVEN_0, _EVEN_2 = np.float32(4.89352518554385e-03), np.float32(2.26843463243900e-03)
_EVEN_4, _EVEN_6 = np.float32(1.18534705686654e-04), np.float32(1.19825839466702e-06)


class Stored(NamedTuple):
    """
    Keys and values of a layer in host memory; a `PackedLayout` of keys, and one of values, follow it.

    Blocks of tokens in full precision are those before the quantized ones, and those after them without a gap.
    """

    keys: int  # address of blocks in full precision [blocks, heads, key_dim, BLOCK]
    values: int  # the same [blocks, heads, BLOCK, width]
    key_bytes: int  # of one block of a head
    value_bytes: int
    packed_keys: int  # address of quantized blocks [quantized blocks, heads, bytes]
    packed_values: int
    query_factors: int  # address of float32 [num_kv_heads, key_dim], for quantized keys; 0 for none
    rotation_matrix: int  # address of float32 [num_kv_heads, value_dim, value_dim], of quantized values; 0 for none
    heads: int  # KV heads of all sequences
    num_kv_heads: int  # of one sequence
    key_dim: int
    inner: int  # key_dim, padded
    value_dim: int
    width: int  # value_dim, padded
    first_quantized: int  # blocks in full precision before the quantized ones
    quantized_blocks: int
    num_tokens: int
    hidden: int  # first tokens that no query sees, and masks have no columns for; none where blocks are quantized


class AttentionCall(NamedTuple):
    """
    A question to stored tokens; in memory `Scratch` follows it.

    A row is a query of one of the query heads that share a KV head: row `g * query_length + i` is query `i` of query
    head `g`. Names with `_of_` are strides in bytes; those of masks are 0 along an axis that has one mask for all.
    """

    # Of each call:
    stored: int  # address of a `Stored`
    query: int  # address of [batch, query heads, query_length, key_dim], the last axis contiguous
    query_of_sequence: int
    query_of_head: int
    query_of_token: int
    query_is_bfloat16: int  # otherwise float32
    out: int  # address of [batch, query heads, query_length, value_dim], written
    out_of_sequence: int
    out_of_head: int
    out_of_token: int
    out_is_bfloat16: int
    lse: int  # address of float32 [batch, query heads, query_length], written
    factor: int  # bits of a float64: 2 to the power of factor * product is a weight, unless there is a cap
    operand_is_bfloat16: int  # whether rows for blocks in full precision are
    rotated_is_bfloat16: int  # whether rows for codes are
    rounds_to_integers: int  # whether what is folded with codes is rounded to integers
    # Parts of a sequence, of a call by few queries:
    parts: int
    quantized_parts: int  # the first ones
    first_part: int  # of the blocks that are shared, see `shared_parts`; those before are of another call
    # Masks:
    seen: int  # address of int64 [batch, query heads, query_length, 2]: the first token and the end; 0 for all tokens
    seen_of_sequence: int
    seen_of_head: int
    seen_of_token: int
    visible: int  # address of uint8 [batch, query heads, query_length, tokens]; 0 for none
    visible_of_sequence: int
    visible_of_head: int
    visible_of_token: int
    bias: int  # address of float32 [batch, query heads, query_length, tokens]; 0 for none
    bias_of_sequence: int
    bias_of_head: int
    bias_of_token: int
    cap: int  # bits of a float64: scores are cap * tanh(factor * product), in the exponent of 2; 0 for no soft cap
    # Scores of one more token of each query head, whose value is zero:
    sinks: int  # address of [batch, query heads]; 0 for none
    sinks_of_sequence: int
    sinks_of_head: int
    sinks_are_bfloat16: int  # otherwise float32
    # Calls that run side by side, for the rows of one pass:
    first_row: int  # of the pass
    is_prefix: int  # whether its tokens are those before others, which the rows attend to by calls after it
    prefix: int  # address of the call whose parts are merged with those of this one; 0 for none
    following: int  # address of the next call of the pass; 0 for none
    # Sizes:
    group: int  # query heads of a KV head
    query_length: int
    rows: int  # of a KV head
    rows_at_once: int  # rows of a part; all rows of a head, in whole tiles, in a call by few queries


class Scratch(NamedTuple):
    """
    Addresses of the memory of part 0, or of thread 0 in a call by many queries; 0 for what a call does not use.

    By few queries a part works beside it in memory that it takes for itself, which its thread still has in its caches;
    of arrays there these are the offsets.
    """

    part_bytes: int  # from a part or thread to the next
    maxima: int  # float32 [rows_at_once], by few queries [num_kv_heads, rows_at_once], as `sums`
    sums: int
    partial: int  # the same, [width] for each
    scores: int  # float32 [ROWS, BLOCK]; by few queries an offset, and one of each of `TILES_AT_ONCE`
    corrections: int  # float32 [ROWS]; likewise
    operand: int  # rows [inner] of queries for blocks in full precision; few queries have one for all parts
    rotated: int  # the same, for codes
    ranges: int  # int64 rows [2], as `seen`; the same
    # By many queries:
    side_bytes: int  # from maxima, sums and partial results of quantized blocks to those of full precision
    key_operand: int
    value_operand: int
    # By few queries, offsets:
    tiles: int  # [TILES_AT_ONCE], see `codes.Tile`
    folded: int  # float32 [ROWS, longest inner axis]
    rounded: int  # float32 or integers [TILES_AT_ONCE, ROWS, longest inner axis]
    steps: int  # float32 [TILES_AT_ONCE, ROWS]
    constants: int  # the same
    rounded_bytes: int  # of a tile in `rounded`
    work_bytes: int  # of all of these


# Bytes of what stands before the scratch memory of a call, and before the layouts of stored tokens.
SCRATCH = 8 * len(AttentionCall._fields)
CALL_BYTES = SCRATCH + 8 * len(Scratch._fields)
KEYS = 8 * len(Stored._fields)
VALUES = KEYS + 8 * len(PackedLayout._fields)
STORED_BYTES = VALUES + 8 * len(PackedLayout._fields)


@jit_inlined
def scratch_at(address):
    """The scratch memory of a call."""
    return call_at(address + SCRATCH, Scratch)


@jit_inlined
def stored_at(address):
    """The stored tokens of a call."""
    return call_at(call_at(address, AttentionCall).stored, Stored)


@jit_inlined
def key_layout(address):
    """The layout of the packed keys of a call."""
    return call_at(call_at(address, AttentionCall).stored + KEYS, PackedLayout)


@jit_inlined
def value_layout(address):
    """The layout of the packed values of a call."""
    return call_at(call_at(address, AttentionCall).stored + VALUES, PackedLayout)


@jit_inlined
def score_factor(address):
    """The factor of the scores, in the exponent of 2."""
    return numba.float32(as_double(call_at(address, AttentionCall).factor))


@jit_inlined
def row_bytes(is_bfloat16, address):
    """Bytes of a row of an operand."""
    return stored_at(address).inner * (2 if is_bfloat16 else 4)


@jit_inlined
def place_of(head, row, address):
    """The sequence, the query head and the index of the query of a row of a KV head; of the last row beyond the end."""
    call, num_kv_heads = call_at(address, AttentionCall), stored_at(address).num_kv_heads
    row, sequence = min(row, call.rows - 1), head // num_kv_heads
    group = row // call.query_length
    kv_head = head - sequence * num_kv_heads
    return sequence, kv_head * call.group + group, row - group * call.query_length


@jit_function
def take_rows(head, first, count, operand, rotated, address):
    """Write rows of queries for blocks in full precision, and for codes: times `query_factors`, rotated as the keys."""
    call, stored = call_at(address, AttentionCall), stored_at(address)
    operand_bytes = row_bytes(call.operand_is_bfloat16, address)
    rotated_bytes = row_bytes(call.rotated_is_bfloat16, address)
    for row in range(count):
        sequence, query_head, index = place_of(head, first + row, address)
        source = call.query + sequence * call.query_of_sequence + query_head * call.query_of_head
        given = Numbers(source + index * call.query_of_token, call.query_is_bfloat16)
        place = operand + row * operand_bytes
        if call.operand_is_bfloat16:
            _copy_halves(given.address, stored.key_dim, place, stored.inner)
        else:
            _load_row(given, stored.key_dim, place, stored.inner)
        if stored.quantized_blocks:
            place = rotated + row * rotated_bytes
            _load_row(given, stored.key_dim, place, stored.inner)
            numbers = floats_at(place, stored.key_dim)
            if stored.query_factors:
                of_head = head % stored.num_kv_heads * stored.key_dim * 4
                factors = floats_at(stored.query_factors + of_head, stored.key_dim)
                for d in range(stored.key_dim):
                    numbers[d] *= factors[d]
            rotate(place, stored.key_dim, key_layout(address).rotation)
            if call.rotated_is_bfloat16:
                store_numbers(floats_at(place, stored.inner), Numbers(place, 1), 0, stored.inner)


@jit_function
def take_ranges(head, first, count, ranges, address):
    """Write the ranges of tokens that rows see; returns the first token that one of them sees, and the end."""
    call, begin, end = call_at(address, AttentionCall), np.int64(2**62), np.int64(0)
    for row in range(count):
        sequence, query_head, index = place_of(head, first + row, address)
        place = call.seen + sequence * call.seen_of_sequence + query_head * call.seen_of_head
        seen = integers_at(place + index * call.seen_of_token, 2)
        written = integers_at(ranges + row * 16, 2)
        written[0], written[1] = seen[0], seen[1]
        begin, end = min(begin, seen[0]), max(end, seen[1])
    return begin, end


@jit_inlined
def shows(ranges, start):
    """Whether one of four rows with `ranges` sees a token of the block from `start` on, and whether all see it all."""
    seen = integers_at(ranges, (ROWS, 2))
    earliest_start, earliest_end = latest_start, latest_end = seen[0, 0], seen[0, 1]
    for row in range(1, ROWS):
        earliest_start, latest_start = min(earliest_start, seen[row, 0]), max(latest_start, seen[row, 0])
        earliest_end, latest_end = min(earliest_end, seen[row, 1]), max(latest_end, seen[row, 1])
    is_seen = earliest_start < start + BLOCK and latest_end > start
    return is_seen, latest_start <= start and earliest_end >= start + BLOCK


@jit_function
def _copy_halves(source, count, target, filled):
    """Copy numbers of 16 bits, with zeros after them."""
    given = array_at(source, count, np.uint16(0))
    copied = array_at(target, filled, np.uint16(0))
    for index in range(count):
        copied[index] = given[index]
    for index in range(count, filled):
        copied[index] = 0


@jit_function
def _load_row(given, count, target, filled):
    """Copy numbers to float32, with zeros after them."""
    numbers = floats_at(target, filled)
    load_numbers(given, 0, count, numbers)
    for index in range(count, filled):
        numbers[index] = 0


@jit_function
def reset_rows(first, count, maxima, sums, partial, width):
    """Let rows, from `first` on, have seen no token yet; the addresses are those of row 0."""
    _fill(maxima + first * 4, count, -np.inf)
    _fill(sums + first * 4, count, 0)
    _fill(partial + first * width * 4, count * width, 0)


@jit_inlined
def _fill(address, count, value):
    numbers = floats_at(address, count)
    for index in range(count):
        numbers[index] = value


@jit_function
def cap_tile(scores, factor, address):
    """Turn the products of four rows into scores by the soft cap."""
    cap = numba.float32(as_double(call_at(address, AttentionCall).cap))
    numbers = floats_at(scores, ROWS * BLOCK)
    for token in range(ROWS * BLOCK):
        numbers[token] = cap * _tanh(numbers[token] * factor)


@jit_inlined
def _tanh(x):
    """The hyperbolic tangent of a float32, by Eigen's rational function: within five units of the last place."""
    x = _TANH_END if x > _TANH_END else x
    x = -_TANH_END if x < -_TANH_END else x
    square = x * x
    odd = _ODD_13 * square + _ODD_11
    odd = odd * square + _ODD_9
    odd = odd * square + _ODD_7
    odd = odd * square + _ODD_5
    odd = odd * square + _ODD_3
    odd = odd * square + _ODD_1
    even = _EVEN_6 * square + _EVEN_4
    even = even * square + _EVEN_2
    even = even * square + _EVEN_0
    return x * odd / even


@jit_function
def mask_tile(head, first, start, ranges, scores, factor, address):
    """
    Multiply the scores of four rows by `factor`, add the bias, and hide the tokens that a query does not see.

    first: number of the first row; start: first token of the block; ranges: address of int64 `[ROWS, 2]`, the first
    token that a row sees and the end, or 0. Minus infinity is added, as torch adds a mask, so that a NaN score stays
    NaN.
    """
    call, stored = call_at(address, AttentionCall), stored_at(address)
    tokens, hidden = min(BLOCK, stored.num_tokens - start), min(max(stored.hidden - start, 0), BLOCK)
    column = start - stored.hidden
    for tile_row in range(ROWS):
        sequence, query_head, index = place_of(head, first + tile_row, address)
        numbers = floats_at(scores + tile_row * BLOCK * 4, BLOCK)
        begin, end = hidden, tokens
        if ranges:
            seen = integers_at(ranges + tile_row * 16, 2)
            begin = min(max(seen[0] - start, begin), tokens)
            end = min(max(seen[1] - start, begin), tokens)
        for token in range(tokens):
            numbers[token] *= factor
        if call.bias:
            row = call.bias + sequence * call.bias_of_sequence + query_head * call.bias_of_head
            bias = floats_at(row + index * call.bias_of_token + column * 4, tokens)
            for token in range(begin, end):
                biased = numbers[token] + bias[token] * _LOG2_E
                numbers[token] = biased if bias[token] == -np.inf else max(biased, _LOWEST)
        if call.visible:
            row = call.visible + sequence * call.visible_of_sequence + query_head * call.visible_of_head
            visible = array_at(row + index * call.visible_of_token + column, tokens, np.uint8(0))
            for token in range(begin, end):
                if visible[token] == 0:
                    numbers[token] += -np.inf
        for token in range(begin):
            numbers[token] += -np.inf
        for token in range(end, tokens):
            numbers[token] += -np.inf
        for token in range(tokens, BLOCK):
            numbers[token] = -np.inf


class PartialResults(NamedTuple):
    """Partial results of some rows of a head; addresses are those of the first row, and of the first part."""

    parts: int
    rotated_parts: int  # the first ones, sums of quantized values
    maxima: int
    sums: int
    partial: int
    part_bytes: int  # from a part to the next one


@jit_inlined
def results_of(head, row, address):
    """The partial results of rows of a head, from `row` on, in a call by few queries."""
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    sequence = head // stored.num_kv_heads
    memory = sequence * call.parts * scratch.part_bytes
    row += (head - sequence * stored.num_kv_heads) * call.rows_at_once
    return PartialResults(
        call.parts,
        call.quantized_parts,
        scratch.maxima + memory + row * 4,
        scratch.sums + memory + row * 4,
        scratch.partial + memory + row * stored.width * 4,
        scratch.part_bytes,
    )


@jit_inlined
def _results_of_prefix(sequence, query_head, index, address):
    """The partial results of a query in the call for its prefix, where rows of several sequences are those of one."""
    call, prefix = call_at(address, AttentionCall), call_at(call_at(address, AttentionCall).prefix, AttentionCall)
    row = call.first_row - prefix.first_row + sequence * call.query_length + index
    of_prefix, kv_head = row // prefix.query_length, query_head // call.group
    row += (query_head - kv_head * call.group - of_prefix) * prefix.query_length
    return results_of(of_prefix * stored_at(address).num_kv_heads + kv_head, row, call.prefix)


@jit_function
def merge_rows(head, first, count, own, address):
    """
    Write outputs and log-sum-exps of rows, from `first` on, merged from their `PartialResults`.

    Those of their prefix, if the call has one, come first.
    """
    call, stored = call_at(address, AttentionCall), stored_at(address)
    merged, floats = np.empty(stored.width, np.float64), np.empty((2, stored.width), np.float32)
    quantized = call.prefix if call.prefix and not own.rotated_parts else address  # both have one codec
    matrix = stored_at(quantized).rotation_matrix
    if matrix:
        matrix += head % stored.num_kv_heads * stored.value_dim * stored.value_dim * 4
    rotation = value_layout(quantized).rotation
    for row in range(count):
        sequence, query_head, index = place_of(head, first + row, address)
        base, total, prefix = _highest(-np.inf, own, row), 0.0, own
        if call.prefix:
            prefix = _results_of_prefix(sequence, query_head, index, address)
            base = _highest(base, prefix, 0)
        # -inf - -inf is NaN.
        base = 0.0 if base == -np.inf else base
        if call.sinks:
            place = call.sinks + sequence * call.sinks_of_sequence + query_head * call.sinks_of_head
            sink = (bfloat16_at(place) if call.sinks_are_bfloat16 else floats_at(place, 1)[0]) * LOG2_E
            base = sink if sink > base else base
            total = _power_of_two(sink - base)
        for column in range(stored.width):
            merged[column] = 0
        if call.prefix:
            total = _add_parts(0, prefix.rotated_parts, prefix, 0, base, total, merged)
        total = _add_parts(0, own.rotated_parts, own, row, base, total, merged)
        if own.rotated_parts or prefix.rotated_parts:
            rotate_back(merged, stored.value_dim, rotation, matrix, floats)
        if call.prefix:
            total = _add_parts(prefix.rotated_parts, prefix.parts, prefix, 0, base, total, merged)
        total = _add_parts(own.rotated_parts, own.parts, own, row, base, total, merged)
        for column in range(stored.width):
            # A row that sees no token gives zeros, or NaN if a score is NaN, as torch does.
            floats[0, column] = merged[column] / total if total != 0 else merged[column]
        target = call.out + sequence * call.out_of_sequence + query_head * call.out_of_head + index * call.out_of_token
        store_numbers(floats[0], Numbers(target, call.out_is_bfloat16), 0, stored.value_dim)
        place = (sequence * stored.num_kv_heads * call.group + query_head) * call.query_length + index
        # Maxima are kept times log2(e).
        floats_at(call.lse, place + 1)[place] = base / LOG2_E + np.log(total)


@jit_function
def _highest(highest, results, row):
    """The highest of a row's maxima over the parts, and of another number."""
    for part in range(results.parts):
        maximum = floats_at(results.maxima + part * results.part_bytes + row * 4, 1)[0]
        if maximum > highest:
            highest = np.float64(maximum)
    return highest


@jit_function
def _add_parts(first, end, results, row, base, total, merged):
    """Add a row's partial results of some parts to `merged`; return `total` with their sums."""
    width = merged.size
    for part in range(first, end):
        memory = part * results.part_bytes
        weight = _power_of_two(floats_at(results.maxima + memory + row * 4, 1)[0] - base)
        total += weight * floats_at(results.sums + memory + row * 4, 1)[0]
        numbers = floats_at(results.partial + memory + row * width * 4, width)
        for column in range(width):
            merged[column] += weight * numbers[column]
    return total


@jit_inlined
def _power_of_two(x):
    """2 to the power of a float64 of at most 0, to 1e-11 relative. The library's is slower than the rest of a merge."""
    if not x >= -1000.0:
        return x - x if np.isnan(x) else 0.0
    whole = np.floor(x + 0.5)
    fraction = (x - whole) * _LN_2
    # The series of e^x, at most 0.35 from 0.
    power = 1.0
    for term in range(10, 0, -1):
        power = 1.0 + power * fraction / term
    return power * np.int64((np.int64(whole) + 1023) << 52).view(np.float64)
