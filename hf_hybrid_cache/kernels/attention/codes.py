"""
Attention of a few queries over quantized blocks in host memory, with blocks in full precision before and after them.

The steps are those of `attention`; products use the codes themselves. Several tiles, four rows by a block, take each
step side by side: the processor then works on the others while a step of one waits for the step before it. They are of
several blocks if a head has four rows, and of one block if it has many.

Scales and minima are folded into the query, or into the weights, before the product with codes. For integer dot
products the folded numbers are rounded, relative to the largest of their row: to 16 bits for codes of 8 bits, which are
multiplied in pairs, and to 8 bits for smaller codes, which are multiplied in fours. The sixteen numbers of a vector are
in the order in which codes come out of the words: 0, 8, 1, 9, ..., or that of `_quad_order`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.code_tiles import BITS, MOST_BITS_OF_QUADS, score_codes, weigh_codes
from ..vector.compiled import Needed, jit, jit_function, jit_inlined, taking_numbers
from ..vector.intrinsics import call_at, prefetch_lines
from ..vector.numbers_at import integers_at, keep
from ..vector.tiles import ROWS, softmax_codes
from ..vector.vector_ir import BLOCK, CACHE_LINE, FLOAT, FLOATS, INT8, INT16, INT64, LANES
from .attention import begin_part, first_line, place_ahead, shown, working_memory
from .attention_call import (
    AttentionCall,
    cap_tile,
    key_layout,
    mask_tile,
    score_factor,
    scratch_at,
    stored_at,
    value_layout,
)

TILES_AT_ONCE = 4


class Tile(NamedTuple):
    """Four rows by a block."""

    head: int
    row: int  # the first one, of those of the head
    row_of_part: int  # the same, of those of the part
    start: int  # the block's first token
    at: int  # place of the block's codes
    following: int  # place of those to prefetch
    ranges: int  # address of what the rows see; 0 for all
    is_masked: int


_TILE_NUMBERS = len(Tile._fields)
TILE_BYTES = 8 * _TILE_NUMBERS
_LINE_SCALES = CACHE_LINE // 2  # bfloat16 scales in a cache line
_PAIR_ORDER = [lane // 2 + lane % 2 * 8 for lane in range(LANES)]
# Vectors to fold together, if they divide the inner axis.
_VECTORS_AT_ONCE = 4


@jit
def attend_codes(part, address):
    """Attend to a part's quantized blocks, with all rows of a head before the next one."""
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    first, blocks, memory = begin_part(part, 0, call.quantized_parts, call.first_part, stored.quantized_blocks, address)
    work = working_memory(address)
    place = first_line(work)
    ahead, count = max(1, TILES_AT_ONCE * ROWS // call.rows_at_once), 0
    last = (blocks.stop - 1) * stored.heads + first + stored.num_kv_heads - 1
    for block in blocks:
        start = (stored.first_quantized + block) * BLOCK
        for head in range(stored.num_kv_heads):
            at = block * stored.heads + first + head
            following = min(place_ahead(at, head, ahead, address), last)
            for row in range(0, call.rows_at_once, ROWS):
                ranges, is_seen, is_masked = shown(first + head, row, start, address)
                if is_seen:
                    tile = integers_at(place + scratch.tiles + count * TILE_BYTES, _TILE_NUMBERS)
                    tile[0], tile[1], tile[2], tile[3] = first + head, row, head * call.rows_at_once + row, start
                    tile[4], tile[5], tile[6], tile[7] = at, following, ranges, is_masked
                    following = at  # once it is prefetched
                    count += 1
                if count == TILES_AT_ONCE:
                    _attend_tiles(count, memory, place, address)
                    count = 0
    if count:
        _attend_tiles(count, memory, place, address)
    keep(work)


@jit_function
def _attend_tiles(count, memory, work, address):
    """Attend with `count` tiles."""
    for group in range(key_layout(address).groups):
        _fold(count, group, True, work, address)
        _score(count, group, work, address)
    _weigh(count, memory, work, address)
    for group in range(value_layout(address).groups):
        _fold(count, group, False, work, address)
        _add_values(count, group, memory, work, address)


@jit_inlined
def _tile(which, work, address):
    return call_at(work + scratch_at(address).tiles + which * TILE_BYTES, Tile)


@jit_function
def _fold(count, group, of_keys, work, address):
    """
    Fold scales and minima of a group of keys into the queries, or of values into the weights.

    It prefetches those of the blocks that come next.
    """
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    form, packed = key_layout(address), stored.packed_keys
    if not of_keys:
        form, packed = value_layout(address), stored.packed_values
    packed += form.scales + group * form.inner * 2
    limit = form.limit if call.rounds_to_integers else 0
    is_quad = limit > 0 and form.bits <= MOST_BITS_OF_QUADS
    middle = numba.float32(((1 << form.bits) - 1) * 0.5 if is_quad else 0)
    factor = score_factor(address) if of_keys else numba.float32(1)
    stride = stored.inner * 4 if of_keys else BLOCK * 4
    for which in range(count):
        tile, of_rows = _tile(which, work, address), work + which * ROWS * 4
        scales = packed + tile.at * form.num_bytes
        _prefetch_scales(packed + tile.following * form.num_bytes, form)
        rows = work + scratch.scores + which * ROWS * BLOCK * 4
        if of_keys:
            rows = scratch.rotated + (tile.head * call.rows_at_once + tile.row) * stride
        fold_rows(
            rows, stride, scales, scales + form.minima, form.inner, form.bits, middle, limit, factor,
            work + scratch.folded, work + scratch.rounded + which * scratch.rounded_bytes,
            scratch.steps + of_rows, scratch.constants + of_rows,
        )  # fmt: skip


@jit_inlined
def _prefetch_scales(scales, form):
    """Prefetch the scales and minima of a group."""
    for first in range(0, form.inner, _LINE_SCALES):
        prefetch_lines(scales + first * 2, 1)
        prefetch_lines(scales + form.minima + first * 2, 1)


@jit_function
def _score(count, group, work, address):
    """Write the scores of a group's tokens, and prefetch the next keys."""
    call, scratch, form = call_at(address, AttentionCall), scratch_at(address), key_layout(address)
    keys, first, end = stored_at(address).packed_keys, group * form.group, min((group + 1) * form.group, BLOCK)
    for which in range(count):
        tile, of_rows = _tile(which, work, address), work + which * ROWS * 4
        score_codes(
            form.bits, call.rounds_to_integers != 0, work + scratch.rounded + which * scratch.rounded_bytes,
            keys + tile.at * form.num_bytes, form.inner, first, end, scratch.steps + of_rows,
            scratch.constants + of_rows, work + scratch.scores + which * ROWS * BLOCK * 4,
            keys + tile.following * form.num_bytes,
        )  # fmt: skip


@jit_function
def _weigh(count, memory, work, address):
    """Turn scores into weights, one tile after the other, as tiles of the same rows share their maxima and sums."""
    call, scratch, one = call_at(address, AttentionCall), scratch_at(address), numba.float32(1)
    for which in range(count):
        tile, scores = _tile(which, work, address), work + scratch.scores + which * ROWS * BLOCK * 4
        if call.cap:
            cap_tile(scores, one, address)
        if tile.is_masked:
            mask_tile(tile.head, tile.row, tile.start, tile.ranges, scores, one, address)
        state, corrections = memory + tile.row_of_part * 4, work + scratch.corrections + which * ROWS * 4
        softmax_codes(scores, one, scratch.maxima + state, scratch.sums + state, corrections)


@jit_function
def _add_values(count, group, memory, work, address):
    """Correct a group's channels in the partial results, add the weighted values, and prefetch the next values."""
    call, stored, scratch, form = (
        call_at(address, AttentionCall),
        stored_at(address),
        scratch_at(address),
        value_layout(address),
    )
    first, end = group * form.group, min((group + 1) * form.group, form.lanes)
    for which in range(count):
        tile, of_rows = _tile(which, work, address), work + which * ROWS * 4
        weigh_codes(
            form.bits, call.rounds_to_integers != 0, work + scratch.rounded + which * scratch.rounded_bytes,
            stored.packed_values + tile.at * form.num_bytes, form.inner, form.lanes, first, end,
            scratch.steps + of_rows, scratch.constants + of_rows, scratch.corrections + of_rows,
            scratch.partial + memory + tile.row_of_part * stored.width * 4,
            stored.packed_values + tile.following * form.num_bytes,
        )  # fmt: skip


def quantized_attention_kernels() -> list[Needed]:
    """The kernel by which few queries attend to quantized blocks."""
    return [(attend_codes, taking_numbers(attend_codes))]


def _quad_order(width: int) -> list[int]:
    """The order of a vector's folded numbers if codes come out of the words four at a time, a byte each."""
    places = [
        (word, shift, byte) for word in range(LANES * width // 32) for shift in range(8 // width) for byte in range(4)
    ]
    return [
        word * (16 // width) + shift + byte % 2 * (8 // width) + byte // 2 * (LANES // 2)
        for word, shift, byte in places
    ]


@intrinsic
def fold_rows(
    typing_context: Any,
    rows: Any,
    stride: Any,
    scales: Any,
    minima: Any,
    inner: Any,
    bits: Any,
    middle: Any,
    limit: Any,
    factor: Any,
    folded: Any,
    operand: Any,
    steps: Any,
    constants: Any,
) -> Any:
    """
    Fold scales and minima of one group into four rows, and round the results to integers.

    The product of a row with what codes stand for, times `factor`, is `steps * operand @ codes + constants`. The error
    of rounding is multiplied by the middle code, so the sum of a row's folded numbers stays exact.

    rows: address of float32 rows, `stride` bytes apart, each `[inner]`; scales, minima: addresses of bfloat16
    `[inner]`; bits: of a code; middle: float32, the middle of all codes if numbers are rounded to 8 bits, which loses
    much, or else 0; limit: the largest integer to round to, or 0 for the portable way, which leaves float32; folded:
    address of float32 `[ROWS, inner]`, scratch; operand: of integers or float32 `[ROWS, inner]`, written; steps,
    constants: of float32 `[ROWS]`, written.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        rows, stride, scales, minima, inner, bits, middle, limit, factor, folded, operand, steps, constants = arguments
        add, multiply = builder.add, builder.mul
        middle, factor = vec.splat(builder, middle), vec.splat(builder, factor)

        def fold(vectors: int, target: ir.Value, order: Sequence[int]) -> tuple[ir.Value, ir.Value]:
            """Fold all numbers. Returns each row's largest, and the part of its product that codes have no part in."""

            def body(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                results = list(carried)
                for part in range(vectors):
                    vector = add(multiply(index, INT64(vectors)), INT64(part))
                    scale, minimum = (
                        vec.load_vectors(
                            context, builder, types.uint16, add(start, multiply(vector, INT64(LANES * 2))), 1
                        )[0]
                        for start in (scales, minima)
                    )
                    minimum = vec.multiply_add(builder, scale, middle, minimum)
                    for row in range(ROWS):
                        place = add(rows, add(multiply(INT64(row), stride), multiply(vector, INT64(LANES * 4))))
                        number = vec.load(builder, place, FLOATS)
                        product = builder.fmul(number, scale)
                        ordered = vec.shuffle(builder, product, product, order)
                        vec.store(builder, ordered, _place(builder, target, row, inner, vector, 4))
                        results[row] = vec.maximum(builder, vec.absolute(builder, product), results[row])
                        results[ROWS + row] = vec.multiply_add(builder, number, minimum, results[ROWS + row])
                return results

            count = builder.sdiv(inner, INT64(LANES * vectors))
            results = vec.loop(builder, count, [vec.floats(0.0)] * (2 * ROWS), body)
            highest, sums = results[:ROWS], results[ROWS:]
            return vec.fold(builder, highest, vec.maximum), vec.fold(builder, sums, vec.add)

        def rounded(vectors: int, width: int, factors: ir.Value) -> ir.Value:
            """Round the folded numbers for codes of `width` bits. Returns the sum of each row's integers."""
            kind, order = (INT8, _quad_order(width)) if width <= MOST_BITS_OF_QUADS else (INT16, _PAIR_ORDER)

            def body(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                first, results = multiply(index, INT64(vectors)), []
                for row in range(ROWS):
                    places = [
                        _place(builder, folded, row, inner, add(first, INT64(part)), 4) for part in range(vectors)
                    ]
                    of_row = vec.splat_fourth(builder, factors, row)
                    integers = [
                        vec.shifted_integers(builder, vec.load(builder, place, FLOATS), of_row) for place in places
                    ]
                    narrow = vec.narrowed(context, builder, integers, kind, order)
                    vec.store(builder, narrow, _place(builder, operand, row, inner, first, kind.width // 8))
                    results.append(vec.reduced(builder, [carried[row], *integers], ir.IRBuilder.add))
                return results

            count = builder.sdiv(inner, INT64(LANES * vectors))
            totals = vec.loop(builder, count, [vec.ints(0)] * ROWS, body)
            totals = [vec.without_shift(builder, total, multiply(count, INT64(vectors))) for total in totals]
            return builder.sitofp(vec.fold(builder, totals, ir.IRBuilder.add), FLOATS)

        def finish(step: ir.Value, constant: ir.Value) -> None:
            vec.store_four(builder, builder.fmul(step, factor), steps)
            vec.store_four(builder, builder.fmul(constant, factor), constants)

        with builder.if_else(builder.icmp_signed(">", limit, INT64(0))) as (then, otherwise):
            with then:
                limit = builder.sitofp(limit, FLOAT)
                most, least = (vec.splat(builder, each) for each in (limit, builder.fdiv(FLOAT(1.0), limit)))
                for vectors in _at_once(builder, inner):
                    largest, constant = fold(vectors, folded, range(LANES))
                    step = builder.fmul(largest, least)
                    nothing = builder.fcmp_ordered("<", largest, vec.floats(vec.NEGLIGIBLE))
                    factors = builder.select(nothing, vec.floats(0.0), builder.fdiv(most, largest))
                    missing = builder.fmul(step, builder.fneg(middle))
                    for width in BITS:
                        with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
                            total = rounded(vectors, width, factors)
                            finish(step, vec.multiply_add(builder, missing, total, constant))
            with otherwise:
                finish(vec.floats(1.0), fold(1, operand, _PAIR_ORDER)[1])
        return context.get_dummy_value()

    kinds = [*[types.int64] * 6, types.float32, types.int64, types.float32, *[types.int64] * 4]
    return types.void(*kinds), generate


def _place(builder: ir.IRBuilder, start: ir.Value, row: int, inner: ir.Value, vector: ir.Value, item: int) -> ir.Value:
    """The address of a vector of a row; a row has `inner` numbers of `item` bytes."""
    numbers = builder.add(builder.mul(INT64(row), inner), builder.mul(vector, INT64(LANES)))
    return builder.add(start, builder.mul(numbers, INT64(item)))


def _at_once(builder: ir.IRBuilder, inner: ir.Value) -> Iterator[int]:
    """Yield the numbers of vectors to take at a time; the code generated for one of them runs."""
    divides = builder.icmp_signed("==", builder.and_(inner, INT64(_VECTORS_AT_ONCE * LANES - 1)), INT64(0))
    for vectors, is_taken in ((_VECTORS_AT_ONCE, divides), (1, builder.not_(divides))):
        with builder.if_then(is_taken):
            yield vectors
