"""
Softmax of scores in slots, four query rows and one block each, in steps that all slots take together (`softmax_tile`).

What needs all scores of a row is done for the rows of all slots at once, a lane for each.
"""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .blocks import BLOCK
from .folding import ROW_BYTES, fold_slots, scale_and_low
from .tiles import ROWS, base_of, reduced, score_places
from .vector_ir import FLOAT, FLOATS, FOUR, INT64, LANES


@intrinsic
def start_softmax(
    typing_context: Any, scores: Any, maxima: Any, sums: Any, highest: Any, old_maxima: Any, old_sums: Any
) -> Any:
    """
    Find the highest scores of a slot, by lanes, and copy what its rows had.

    scores: address of float32 `[ROWS, BLOCK]`, powers of two; maxima, sums: of float32 `[ROWS]`, copied to `old_maxima`
    and `old_sums`; highest: of float32 `[ROWS, LANES]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores, maxima, sums, highest, old_maxima, old_sums = arguments
        for row, places in enumerate(score_places(builder, scores)):
            loaded = [vec.load(builder, place, FLOATS) for place in places]
            place = builder.add(highest, INT64(row * ROW_BYTES))
            vec.store(builder, reduced(builder, loaded, vec.maximum), place)
        _copy_four(builder, maxima, old_maxima)
        _copy_four(builder, sums, old_sums)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def raise_maxima(typing_context: Any, highest: Any, maxima: Any, corrections: Any) -> Any:
    """
    Raise the maxima of all slots to their highest scores, and write what corrects sums relative to the old ones.

    highest: address of float32 `[SLOTS, ROWS, LANES]`; maxima, corrections: of float32 `[SLOTS, ROWS]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        highest, maxima, corrections = arguments
        old = vec.load(builder, maxima, FLOATS)
        new = vec.maximum(builder, fold_slots(builder, highest, FLOATS, vec.maximum), old)
        vec.store(builder, new, maxima)
        correction = vec.exp2(context, builder, builder.fsub(old, base_of(builder, new)), 4)
        vec.store(builder, correction, corrections)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def weigh_scores(typing_context: Any, scores: Any, new_maxima: Any, maxima: Any, sums: Any) -> Any:
    """
    Turn the scores of a slot into weights, relative to the new maxima of its rows, which are copied to `maxima`.

    scores: address of float32 `[ROWS, BLOCK]`; new_maxima, maxima: of float32 `[ROWS]`; sums: of float32
    `[ROWS, LANES]`: of the weights, by lanes.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores, new_maxima, maxima, sums = arguments
        places = score_places(builder, scores)
        for row, weights in enumerate(_weights(context, builder, scores, new_maxima)):
            for weight, place in zip(weights, places[row], strict=True):
                vec.store(builder, weight, place)
            vec.store(builder, reduced(builder, weights, vec.add), builder.add(sums, INT64(row * ROW_BYTES)))
        _copy_four(builder, new_maxima, maxima)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def weigh_and_fold_scores(
    typing_context: Any,
    scores: Any,
    new_maxima: Any,
    maxima: Any,
    sums: Any,
    scales: Any,
    lows: Any,
    middle: Any,
    folded: Any,
    highest: Any,
    folded_sums: Any,
) -> Any:
    """
    What `weigh_scores` does, and then `fold_rows` with a limit, without writing weights.

    scales, lows, middle: of the values; folded: address of float32 `[ROWS, BLOCK]`, written, as are highest and
    folded_sums, of float32 `[ROWS, LANES]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores, new_maxima, maxima, sums, scales, lows, middle, folded, highest, folded_sums = arguments
        middle = vec.splat(builder, middle)
        chunks = range(BLOCK // LANES)
        of_chunks = [scale_and_low(context, builder, scales, lows, INT64(chunk), middle) for chunk in chunks]
        targets = score_places(builder, folded)
        for row, weights in enumerate(_weights(context, builder, scores, new_maxima)):
            products = [builder.fmul(weight, scale) for weight, (scale, _) in zip(weights, of_chunks, strict=True)]
            for product, place in zip(products, targets[row], strict=True):
                vec.store(builder, product, place)
            constant = vec.floats(0.0)
            for weight, (_, low) in zip(weights, of_chunks, strict=True):
                constant = vec.multiply_add(builder, weight, low, constant)
            for start, vector in (
                (sums, reduced(builder, weights, vec.add)),
                (highest, reduced(builder, products, vec.maximum)),
                (folded_sums, constant),
            ):
                vec.store(builder, vector, builder.add(start, INT64(row * ROW_BYTES)))
        _copy_four(builder, new_maxima, maxima)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32, *[types.int64] * 3), generate


def _weights(context: Any, builder: ir.IRBuilder, scores: ir.Value, maxima: ir.Value) -> Iterator[list[ir.Value]]:
    """Those of the rows of a slot, one after the other."""
    for row, places in enumerate(score_places(builder, scores)):
        highest = vec.splat(builder, vec.load(builder, builder.add(maxima, INT64(row * 4)), FLOAT))
        base = base_of(builder, highest)
        powers = [builder.fsub(vec.load(builder, place, FLOATS), base) for place in places]
        yield [vec.exp2(context, builder, power, 4) for power in powers]


@intrinsic
def add_up_weights(typing_context: Any, added: Any, corrections: Any, sums: Any) -> Any:
    """
    Correct the sums of all slots and add those of the weights.

    added: address of float32 `[SLOTS, ROWS, LANES]`; corrections, sums: of float32 `[SLOTS, ROWS]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        added, corrections, sums = arguments
        total = fold_slots(builder, added, FLOATS, vec.add)
        before = builder.fmul(vec.load(builder, sums, FLOATS), vec.load(builder, corrections, FLOATS))
        vec.store(builder, builder.fadd(before, total), sums)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def correct_nothing(typing_context: Any, corrections: Any) -> Any:
    """Let four corrections be ones."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        vec.store(builder, ir.Constant(FOUR, [1.0] * ROWS), arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _joined_lanes(operation: Any, does: str) -> Any:
    def join(typing_context: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            for row in range(ROWS):
                source, target = (builder.add(each, INT64(row * ROW_BYTES)) for each in arguments)
                joined = operation(builder, vec.load(builder, source, FLOATS), vec.load(builder, target, FLOATS))
                vec.store(builder, joined, target)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    join.__doc__ = f"{does} the numbers of another slot, float32 `[ROWS, LANES]`, of which both addresses are given."
    return intrinsic(join)


raise_lanes = _joined_lanes(vec.maximum, "Raise to")
add_lanes = _joined_lanes(vec.add, "Add")


@intrinsic
def copy_four(typing_context: Any, source: Any, target: Any) -> Any:
    """Copy four float32 from one address to another."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _copy_four(builder, *arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _copy_four(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
    vec.store(builder, vec.load(builder, source, FOUR), target)
