"""
The softmax of `tiles.softmax_tile` for several slots together; a slot is four query rows and one block.

A step that needs all scores of a row runs for the rows of all slots at once, with a lane for each row.
"""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..blocks import BLOCK
from ..quantized.folding import ROW_BYTES, fold_slots, scale_and_minimum
from ..vector import vector_ir as vec
from ..vector.tiles import ROWS, base_of, reduced, score_places
from ..vector.vector_ir import FLOAT, FLOATS, FOUR, INT64, LANES


@intrinsic
def start_softmax(
    typing_context: Any, scores: Any, maxima: Any, sums: Any, highest: Any, old_maxima: Any, old_sums: Any
) -> Any:
    """
    Find the highest scores of a slot's rows, by lanes, and copy the rows' maxima and sums.

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
    Raise the maxima of all slots to their highest scores, and write the factors that correct the old sums.

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
    Turn the scores of a slot into weights relative to `new_maxima`, and copy `new_maxima` to `maxima`.

    scores: address of float32 `[ROWS, BLOCK]`; new_maxima, maxima: of float32 `[ROWS]`; sums: of float32
    `[ROWS, LANES]`, written: sums of the weights, by lanes.
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
    minima: Any,
    middle: Any,
    folded: Any,
    highest: Any,
    folded_sums: Any,
) -> Any:
    """
    Run `weigh_scores` and then `fold_rows` with a limit, without writing the weights.

    scales, minima, middle: of the values; folded: address of float32 `[ROWS, BLOCK]`, written; highest, folded_sums: of
    float32 `[ROWS, LANES]`, written.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores, new_maxima, maxima, sums, scales, minima, middle, folded, highest, folded_sums = arguments
        middle = vec.splat(builder, middle)
        chunks = range(BLOCK // LANES)
        of_chunks = [scale_and_minimum(context, builder, scales, minima, INT64(chunk), middle) for chunk in chunks]
        targets = score_places(builder, folded)
        for row, weights in enumerate(_weights(context, builder, scores, new_maxima)):
            products = [builder.fmul(weight, scale) for weight, (scale, _) in zip(weights, of_chunks, strict=True)]
            for product, place in zip(products, targets[row], strict=True):
                vec.store(builder, product, place)
            constant = vec.floats(0.0)
            for weight, (_, minimum) in zip(weights, of_chunks, strict=True):
                constant = vec.multiply_add(builder, weight, minimum, constant)
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
    """Yield the weights of each row of a slot, as vectors."""
    for row, places in enumerate(score_places(builder, scores)):
        highest = vec.splat(builder, vec.load(builder, builder.add(maxima, INT64(row * 4)), FLOAT))
        base = base_of(builder, highest)
        powers = [builder.fsub(vec.load(builder, place, FLOATS), base) for place in places]
        yield [vec.exp2(context, builder, power, 4) for power in powers]


@intrinsic
def add_up_weights(typing_context: Any, added: Any, corrections: Any, sums: Any) -> Any:
    """
    Correct the sums of all slots and add the sums of the new weights.

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
    """Set the four corrections of a slot to one."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        vec.store(builder, ir.Constant(FOUR, [1.0] * ROWS), arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _joined_lanes(operation: Any, result: str) -> Any:
    def join(typing_context: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            for row in range(ROWS):
                source, target = (builder.add(each, INT64(row * ROW_BYTES)) for each in arguments)
                joined = operation(builder, vec.load(builder, source, FLOATS), vec.load(builder, target, FLOATS))
                vec.store(builder, joined, target)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    join.__doc__ = f"Write to `target` the {result} of both slots' numbers; addresses of float32 `[ROWS, LANES]`."
    return intrinsic(join)


raise_lanes = _joined_lanes(vec.maximum, "maximum")
add_lanes = _joined_lanes(vec.add, "sum")


@intrinsic
def copy_four(typing_context: Any, source: Any, target: Any) -> Any:
    """Copy four float32 from one address to another."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _copy_four(builder, *arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _copy_four(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
    vec.store(builder, vec.load(builder, source, FOUR), target)
