"""
Folding of the scales and minima of quantized blocks into the query, or into the weights.

It comes before the product with the codes.

For integer dot products the folded numbers are rounded, relative to the largest of their row: to 16 bits for codes of
8 bits, which are multiplied in pairs (`pair_dots`), and to 8 bits for smaller codes, which are multiplied in fours
(`quad_dots`). The sixteen numbers of a chunk are in the order in which codes come out of the words: 0, 8, 1, 9, ..., or
the order of `_quad_order`.

Four blocks are folded side by side, in slots. A step that needs all numbers of a row, `find_steps` or `find_constants`,
runs for the rows of all slots at once, with a lane for each row. The product of a row is
`steps * operand @ codes + constants`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.tiles import ROWS, load_vectors, reduced
from ..vector.vector_ir import FLOAT, FLOATS, INT8, INT16, INT64, INTS, LANES
from .quantized_blocks import BITS, CHUNK

# Codes of at most these bits are multiplied four at a time, with folded numbers of 8 bits.
MOST_BITS_OF_QUADS = 4
# The rows of this many slots fill a vector.
SLOTS = LANES // ROWS
_PAIR_ORDER = [lane // 2 + lane % 2 * 8 for lane in range(CHUNK)]
# Chunks to fold together, if they divide the inner axis.
_STRIP = 4
ROW_BYTES = LANES * 4


def _quad_order(width: int) -> list[int]:
    """The order of a chunk's folded numbers if codes come out of the words four at a time, a byte each."""
    places = [
        (word, shift, byte) for word in range(CHUNK * width // 32) for shift in range(8 // width) for byte in range(4)
    ]
    return [
        word * (16 // width) + shift + byte % 2 * (8 // width) + byte // 2 * (CHUNK // 2)
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
    middle: Any,
    limit: Any,
    folded: Any,
    operand: Any,
    highest: Any,
    sums: Any,
) -> Any:
    """
    Fold scales and minima of one group into the four rows of a slot.

    rows: address of float32 rows, `stride` bytes apart, each `[inner]`; scales, minima: addresses of bfloat16
    `[inner]`; middle: float32, see `middle_of_codes`; limit: the largest integer to round to, or 0 for the portable
    way; folded: address of float32 `[ROWS, inner]`, written; operand: of float32 `[ROWS, inner]`, written instead of
    `folded` by the portable way; highest: of float32 `[ROWS, LANES]`, written: the largest folded number by lanes;
    sums: of float32 `[ROWS, LANES]`, written: the part of the product that does not depend on codes, by lanes.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        rows, stride, scales, minima, inner, middle, limit, folded, operand, highest, sums = arguments
        add, multiply = builder.add, builder.mul
        middle = vec.splat(builder, middle)

        def fold(chunks: int, target: ir.Value, order: Sequence[int]) -> None:
            def fold_chunks(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                results = list(carried)
                for part in range(chunks):
                    chunk = add(multiply(index, INT64(chunks)), INT64(part))
                    scale, minimum = scale_and_minimum(context, builder, scales, minima, chunk, middle)
                    for row in range(ROWS):
                        place = add(rows, add(multiply(INT64(row), stride), multiply(chunk, INT64(CHUNK * 4))))
                        number = vec.load(builder, place, FLOATS)
                        product = builder.fmul(number, scale)
                        ordered = vec.shuffle(builder, product, product, order)
                        vec.store(builder, ordered, _place(builder, target, row, inner, chunk, 4))
                        results[row] = vec.maximum(builder, vec.absolute(builder, product), results[row])
                        results[ROWS + row] = vec.multiply_add(builder, number, minimum, results[ROWS + row])
                return results

            count = builder.sdiv(inner, INT64(CHUNK * chunks))
            results = vec.loop(builder, count, [vec.floats(0.0)] * (2 * ROWS), fold_chunks)
            for row in range(ROWS):
                vec.store(builder, results[row], add(highest, INT64(row * ROW_BYTES)))
                vec.store(builder, results[ROWS + row], add(sums, INT64(row * ROW_BYTES)))

        is_integer = builder.icmp_signed(">", limit, INT64(0))
        with builder.if_else(is_integer) as (then, otherwise):
            with then:
                for chunks in _strips(builder, inner):
                    fold(chunks, folded, range(CHUNK))
            with otherwise:
                fold(1, operand, _PAIR_ORDER)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32, *[types.int64] * 5), generate


def scale_and_minimum(
    context: Any, builder: ir.IRBuilder, scales: ir.Value, minima: ir.Value, chunk: ir.Value, middle: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Load the scales and minima of a chunk as floats, and replace each minimum by the value of the middle code."""
    offset = builder.mul(chunk, INT64(CHUNK * 2))
    scale, minimum = (
        load_vectors(context, builder, types.uint16, builder.add(start, offset), 1)[0] for start in (scales, minima)
    )
    return scale, vec.multiply_add(builder, scale, middle, minimum)


@intrinsic
def find_steps(typing_context: Any, limit: Any, highest: Any, steps: Any, factors: Any) -> Any:
    """
    Write the step of each row of all slots, which an integer is a multiple of, and the reciprocal of the step.

    limit: the largest integer; highest: address of float32 `[SLOTS, ROWS, LANES]`; steps, factors: addresses of float32
    `[SLOTS, ROWS]`; factors are 0 where the step is negligible.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        limit, highest, steps, factors = arguments
        largest = fold_slots(builder, highest, FLOATS, vec.maximum)
        limit = builder.sitofp(limit, FLOAT)
        nothing = builder.fcmp_ordered("<", largest, vec.floats(vec.NEGLIGIBLE))
        most, least = (vec.splat(builder, each) for each in (limit, builder.fdiv(FLOAT(1.0), limit)))
        vec.store(builder, builder.fmul(largest, least), steps)
        vec.store(builder, builder.select(nothing, vec.floats(0.0), builder.fdiv(most, largest)), factors)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def round_rows(typing_context: Any, folded: Any, inner: Any, bits: Any, factors: Any, operand: Any, totals: Any) -> Any:
    """
    Round the folded numbers of a slot to integers, in the width and order for codes of `bits`.

    folded: address of float32 `[ROWS, inner]`; factors: of float32 `[ROWS]`; operand: of integers `[ROWS, inner]`,
    written; totals: of int32 `[ROWS, LANES]`, written: sums of the integers, by lanes.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        folded, inner, bits, factors, operand, totals = arguments
        add, multiply = builder.add, builder.mul
        of_rows = [vec.splat(builder, vec.load(builder, add(factors, INT64(row * 4)), FLOAT)) for row in range(ROWS)]

        def round_all(chunks: int, width: int) -> None:
            kind, order = (INT8, _quad_order(width)) if _is_quad(width) else (INT16, _PAIR_ORDER)

            def round_chunks(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                first, results = multiply(index, INT64(chunks)), []
                for row, factor in enumerate(of_rows):
                    places = [_place(builder, folded, row, inner, add(first, INT64(part)), 4) for part in range(chunks)]
                    numbers = [vec.load(builder, place, FLOATS) for place in places]
                    integers = [vec.shifted_integers(builder, each, factor) for each in numbers]
                    narrow = vec.narrowed(context, builder, integers, kind, order)
                    vec.store(builder, narrow, _place(builder, operand, row, inner, first, kind.width // 8))
                    results.append(reduced(builder, [carried[row], *integers], ir.IRBuilder.add))
                return results

            count = builder.sdiv(inner, INT64(CHUNK * chunks))
            results = vec.loop(builder, count, [vec.ints(0)] * ROWS, round_chunks)
            for row, total in enumerate(results):
                total = vec.without_shift(builder, total, multiply(count, INT64(chunks)))
                vec.store(builder, total, add(totals, INT64(row * ROW_BYTES)))

        for width in BITS:
            with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
                for chunks in _strips(builder, inner):
                    round_all(chunks, width)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def find_constants(
    typing_context: Any, middle: Any, limit: Any, sums: Any, totals: Any, factor: Any, steps: Any, constants: Any
) -> Any:
    """
    Write the steps and constants of the rows of all slots: a row is `steps * operand @ codes + constants`.

    The error of rounding is multiplied by the middle code, so the sum of a row's folded numbers stays exact.

    middle: float32, see `middle_of_codes`; factor: float32, of both results; sums: address of float32
    `[SLOTS, ROWS, LANES]`; totals: of int32 `[SLOTS, ROWS, LANES]`; steps: of float32 `[SLOTS, ROWS]`, those of
    `find_steps` before and the results after; constants: of float32 `[SLOTS, ROWS]`, written.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        middle, limit, sums, totals, factor, steps, constants = arguments
        factor, constant = vec.splat(builder, factor), fold_slots(builder, sums, FLOATS, vec.add)

        def finish(step: ir.Value, constant: ir.Value) -> None:
            vec.store(builder, builder.fmul(step, factor), steps)
            vec.store(builder, builder.fmul(constant, factor), constants)

        with builder.if_else(builder.icmp_signed(">", limit, INT64(0))) as (then, otherwise):
            with then:
                step = vec.load(builder, steps, FLOATS)
                missing = builder.fmul(step, builder.fneg(vec.splat(builder, middle)))
                total = fold_slots(builder, totals, INTS, ir.IRBuilder.add)
                finish(step, vec.multiply_add(builder, missing, builder.sitofp(total, FLOATS), constant))
            with otherwise:
                finish(vec.floats(1.0), constant)
        return context.get_dummy_value()

    kinds = [types.float32, *[types.int64] * 3, types.float32, *[types.int64] * 2]
    return types.void(*kinds), generate


@intrinsic
def middle_of_codes(typing_context: Any, bits: Any, limit: Any) -> Any:
    """The middle of all codes if folded numbers are rounded to 8 bits, which loses much; else zero."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        middle: ir.Value = FLOAT(0.0)
        for width in BITS:
            if _is_quad(width):
                is_width = builder.icmp_signed("==", arguments[0], INT64(width))
                is_rounded = builder.and_(is_width, builder.icmp_signed(">", arguments[1], INT64(0)))
                middle = builder.select(is_rounded, FLOAT((2**width - 1) / 2), middle)
        return middle

    return types.float32(types.int64, types.int64), generate


def fold_slots(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, operation: Any) -> ir.Value:
    """Fold each vector of `[SLOTS, ROWS, LANES]` into one number: a vector `[SLOTS, ROWS]`."""
    places = [builder.add(address, INT64(index * ROW_BYTES)) for index in range(SLOTS * ROWS)]
    return vec.fold_sixteen(builder, [vec.load(builder, place, kind) for place in places], operation)


def _place(builder: ir.IRBuilder, start: ir.Value, row: int, inner: ir.Value, chunk: ir.Value, item: int) -> ir.Value:
    """The address of a chunk of a row; a row has `inner` numbers of `item` bytes."""
    numbers = builder.add(builder.mul(INT64(row), inner), builder.mul(chunk, INT64(CHUNK)))
    return builder.add(start, builder.mul(numbers, INT64(item)))


def _strips(builder: ir.IRBuilder, inner: ir.Value) -> Iterator[int]:
    """Yield the numbers of chunks to take at a time; the code generated for one of them runs."""
    has_strips = builder.icmp_signed("==", builder.and_(inner, INT64(_STRIP * CHUNK - 1)), INT64(0))
    for chunks, is_taken in ((_STRIP, has_strips), (1, builder.not_(has_strips))):
        with builder.if_then(is_taken):
            yield chunks


def _is_quad(width: int) -> bool:
    return width <= MOST_BITS_OF_QUADS
