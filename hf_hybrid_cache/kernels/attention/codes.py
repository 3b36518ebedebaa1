"""
Attention of a few queries over quantized blocks in host memory, with blocks in full precision before and after them.

The steps are those of `attention`; products use the codes themselves. Several blocks take each step side by side: the
processor then works on the others while a step of one waits for the step before it.

Scales and minima are folded into the query, or into the weights, before the product with codes. For integer dot
products the folded numbers are rounded, relative to the largest of their row: to 16 bits for codes of 8 bits, which are
multiplied in pairs, and to 8 bits for smaller codes, which are multiplied in fours. The sixteen numbers of a vector are
in the order in which codes come out of the words: 0, 8, 1, 9, ..., or that of `_quad_order`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.code_tiles import BITS, MOST_BITS_OF_QUADS, score_codes, weigh_codes
from ..vector.compiled import Needed, jit, jit_function, jit_inlined, taking_numbers
from ..vector.intrinsics import call_at, prefetch_lines
from ..vector.numbers_at import integers_at
from ..vector.tiles import ROWS, softmax_codes
from ..vector.vector_ir import BLOCK, CACHE_LINE, FLOAT, FLOATS, INT8, INT16, INT64, LANES
from .attention import has_mask, share, start_part
from .attention_call import (
    AttentionCall,
    cap_tile,
    key_layout,
    mask_tile,
    score_factor,
    scratch_at,
    shows,
    stored_at,
    value_layout,
)

BLOCKS_AT_ONCE = 4
# The numbers of each of the blocks side by side: its head, its first token, the addresses of its codes, and those of
# the codes that are attended to next.
_HEAD, _START, _KEYS, _VALUES, _NEXT_KEYS, _NEXT_VALUES = range(6)
_NUMBERS = 6
BLOCKS_BYTES = 8 * BLOCKS_AT_ONCE * _NUMBERS
_LINE_SCALES = CACHE_LINE // 2  # bfloat16 scales in a cache line
_PAIR_ORDER = [lane // 2 + lane % 2 * 8 for lane in range(LANES)]
# Vectors to fold together, if they divide the inner axis.
_VECTORS_AT_ONCE = 4


@jit
def attend_codes(part, address):
    """Attend to a part's quantized blocks, in the order of memory: all heads of a block before the next one."""
    call, stored = call_at(address, AttentionCall), stored_at(address)
    keys, values, memory = key_layout(address), value_layout(address), part * scratch_at(address).part_bytes
    items = share(part, call.quantized_parts, stored.quantized_blocks * stored.heads)
    start_part(part, items, address)
    for first in range(items.start, items.stop, BLOCKS_AT_ONCE):
        count = min(BLOCKS_AT_ONCE, items.stop - first)
        _place_blocks(first, count, items.stop - 1, memory, address)
        for row in range(0, call.rows_at_once, ROWS):
            for group in range(keys.groups):
                _fold(count, row, group, True, memory, address)
                _score(count, group, memory, address)
            _weigh(count, row, memory, address)
            for group in range(values.groups):
                _fold(count, row, group, False, memory, address)
                _add_values(count, row, group, memory, address)


@jit_inlined
def _place_blocks(first, count, last, memory, address):
    """Note the blocks, from number `first` on, that are attended to side by side. Number `last` is the part's last."""
    stored, blocks = stored_at(address), _blocks(memory, address)
    key_bytes, value_bytes = key_layout(address).num_bytes, value_layout(address).num_bytes
    for which in range(count):
        item = first + which
        block, following = item // stored.heads, min(item + BLOCKS_AT_ONCE, last)
        blocks[which, _HEAD] = item - block * stored.heads
        blocks[which, _START] = (stored.first_quantized + block) * BLOCK
        blocks[which, _KEYS] = stored.packed_keys + item * key_bytes
        blocks[which, _VALUES] = stored.packed_values + item * value_bytes
        blocks[which, _NEXT_KEYS] = stored.packed_keys + following * key_bytes
        blocks[which, _NEXT_VALUES] = stored.packed_values + following * value_bytes


@jit_inlined
def _blocks(memory, address):
    scratch = scratch_at(address)
    return integers_at(scratch.blocks + memory, (BLOCKS_AT_ONCE, _NUMBERS))


@jit_function
def _fold(count, row, group, of_keys, memory, address):
    """
    Fold scales and minima of a group of keys into the queries, or of values into the weights.

    It prefetches those of the blocks that come next.
    """
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    form, blocks = key_layout(address) if of_keys else value_layout(address), _blocks(memory, address)
    limit = form.limit if call.rounds_to_integers else 0
    is_quad = limit > 0 and form.bits <= MOST_BITS_OF_QUADS
    middle = numba.float32(((1 << form.bits) - 1) * 0.5 if is_quad else 0)
    factor = score_factor(address) if of_keys else numba.float32(1)
    stride, at = stored.inner * 4 if of_keys else BLOCK * 4, form.scales + group * form.inner * 2
    for which in range(count):
        scales = blocks[which, _KEYS if of_keys else _VALUES] + at
        _prefetch_scales(blocks[which, _NEXT_KEYS if of_keys else _NEXT_VALUES] + at, form)
        rows, of_rows = scratch.scores + memory + which * ROWS * BLOCK * 4, memory + which * ROWS * 4
        if of_keys:
            rows = scratch.rotated + (blocks[which, _HEAD] * call.rows_at_once + row) * stride
        fold_rows(
            rows, stride, scales, scales + form.minima, form.inner, form.bits, middle, limit, factor,
            scratch.folded + memory, scratch.rounded + memory + which * scratch.rounded_bytes,
            scratch.steps + of_rows, scratch.constants + of_rows,
        )  # fmt: skip


@jit_inlined
def _prefetch_scales(scales, form):
    """Prefetch the scales and minima of a group."""
    for first in range(0, form.inner, _LINE_SCALES):
        prefetch_lines(scales + first * 2, 1)
        prefetch_lines(scales + form.minima + first * 2, 1)


@jit_function
def _score(count, group, memory, address):
    """Write the scores of a group's tokens, and prefetch the next keys."""
    call, scratch, form = call_at(address, AttentionCall), scratch_at(address), key_layout(address)
    blocks, first, end = _blocks(memory, address), group * form.group, min((group + 1) * form.group, BLOCK)
    for which in range(count):
        of_rows = memory + which * ROWS * 4
        score_codes(
            form.bits, call.rounds_to_integers != 0, scratch.rounded + memory + which * scratch.rounded_bytes,
            blocks[which, _KEYS], form.inner, first, end, scratch.steps + of_rows, scratch.constants + of_rows,
            scratch.scores + memory + which * ROWS * BLOCK * 4, blocks[which, _NEXT_KEYS],
        )  # fmt: skip


@jit_function
def _weigh(count, row, memory, address):
    """Turn scores into weights, one block after the other, as blocks of the same head share their maxima and sums."""
    call, scratch = call_at(address, AttentionCall), scratch_at(address)
    blocks, one = _blocks(memory, address), numba.float32(1)
    for which in range(count):
        head, scores = blocks[which, _HEAD], scratch.scores + memory + which * ROWS * BLOCK * 4
        if call.cap:
            cap_tile(scores, one, address)
        at, ranges, is_masked = head * call.rows_at_once + row, 0, has_mask(address)
        if call.seen:
            ranges = scratch.ranges + at * 16
            is_masked = is_masked or not shows(ranges, blocks[which, _START])[1]
        if is_masked:
            mask_tile(head, row, blocks[which, _START], ranges, scores, one, address)
        state, corrections = memory + at * 4, scratch.corrections + memory
        softmax_codes(scores, one, scratch.maxima + state, scratch.sums + state, corrections + which * ROWS * 4)


@jit_function
def _add_values(count, row, group, memory, address):
    """Correct a group's channels in the partial results, add the weighted values, and prefetch the next values."""
    call, stored, scratch, form = (
        call_at(address, AttentionCall),
        stored_at(address),
        scratch_at(address),
        value_layout(address),
    )
    blocks, first, end = _blocks(memory, address), group * form.group, min((group + 1) * form.group, form.lanes)
    for which in range(count):
        of_rows, at = memory + which * ROWS * 4, blocks[which, _HEAD] * call.rows_at_once + row
        weigh_codes(
            form.bits, call.rounds_to_integers != 0, scratch.rounded + memory + which * scratch.rounded_bytes,
            blocks[which, _VALUES], form.inner, form.lanes, first, end, scratch.steps + of_rows,
            scratch.constants + of_rows, scratch.corrections + of_rows,
            scratch.partial + memory + at * stored.width * 4, blocks[which, _NEXT_VALUES],
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
