"""
The steps of attention for four query rows and one block whose numbers are bfloat16, packed in pairs.

The processor multiplies two pairs of bfloat16 and adds both products to a float32 in one instruction (AVX512-BF16).
Packed keys are `[key_dim / 2, 64]`, two channels of a token in 32 bits; packed values are `[32, width]`, two tokens of
a channel. The instruction takes numbers smaller than 1.2e-38 for zero.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..blocks import BLOCK
from ..vector import vector_ir as vec
from ..vector.processor import has_bfloat16_products
from ..vector.tiles import ROWS, softmax_of, store_in_place, wide_vectors
from ..vector.vector_ir import FLOAT, FLOATS, INT16, INT32, INT64, INTS, LANES

_HALVES = ir.VectorType(INT16, 2 * LANES)


def multiply_pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """`total` plus the products of both pairs of bfloat16 in each lane."""
    dot = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    return builder.asm(dot, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [total, a, b], False)


def _rows_of_pairs(
    builder: ir.IRBuilder,
    rows: ir.Value,
    stride: ir.Value,
    columns: ir.Value,
    column_bytes: ir.Value,
    count: ir.Value,
    sums: list[ir.Value],
) -> list[ir.Value]:
    """`sums` plus the products of four rows of `count` pairs with columns of as many pairs."""
    vectors = len(sums) // ROWS

    def body(pair: ir.Value, accumulators: list[ir.Value]) -> list[ir.Value]:
        start = builder.add(columns, builder.mul(pair, column_bytes))
        loaded = [vec.load(builder, builder.add(start, INT64(k * LANES * 4)), INTS) for k in range(vectors)]
        results = []
        for row in range(ROWS):
            place = builder.add(rows, builder.add(builder.mul(INT64(row), stride), builder.mul(pair, INT64(4))))
            number = vec.splat(builder, vec.load(builder, place, INT32))
            of_row = accumulators[row * vectors : (row + 1) * vectors]
            results += [
                multiply_pairs(builder, each, number, total) for each, total in zip(loaded, of_row, strict=True)
            ]
        return results

    return vec.loop(builder, count, sums, body)


@intrinsic
def score_packed_tile(typing_context: Any, query: Any, stride: Any, keys: Any, pairs: Any, scores: Any) -> Any:
    """
    Write `scores = query @ keys`.

    query: address of rows of pairs, `stride` bytes apart; keys: address of packed keys, `[pairs, BLOCK]`; scores:
    address of float32 `[ROWS, BLOCK]`. Writes nothing if the processor lacks the instruction.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if has_bfloat16_products():
            query, stride, keys, pairs, scores = arguments
            sums = [vec.floats(0.0)] * (ROWS * BLOCK // LANES)
            results = _rows_of_pairs(builder, query, stride, keys, INT64(BLOCK * 4), pairs, sums)
            for index, result in enumerate(results):
                vec.store(builder, result, builder.add(scores, INT64(index * LANES * 4)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _weigh(is_wide: bool) -> Any:
    def weigh(
        typing_context: Any, weights: Any, values: Any, pairs: Any, width: Any, column: Any, corrections: Any, out: Any
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            if not has_bfloat16_products():
                return context.get_dummy_value()
            weights, values, pairs, width, column, corrections, out = arguments
            row_bytes, first = builder.mul(width, INT64(4)), builder.mul(column, INT64(4))
            places, sums = [], []
            for row in range(ROWS):
                correction = vec.splat(builder, vec.load(builder, builder.add(corrections, INT64(row * 4)), FLOAT))
                start = builder.add(out, builder.add(builder.mul(INT64(row), row_bytes), first))
                for vector in range(wide_vectors(context) if is_wide else 1):
                    place = builder.add(start, INT64(vector * LANES * 4))
                    places.append(place)
                    sums.append(builder.fmul(vec.load(builder, place, FLOATS), correction))
            values = builder.add(values, first)
            results = _rows_of_pairs(builder, weights, INT64(BLOCK * 4), values, row_bytes, pairs, sums)
            for result, place in zip(results, places, strict=True):
                vec.store(builder, result, place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    columns = "tile_columns()" if is_wide else str(LANES)
    weigh.__doc__ = f"""
    Correct `out[:, column : column + {columns}]` and add `weights @ values` to it.

    weights: address of rows of pairs, `BLOCK * 4` bytes apart, as `softmax_packed_tile` leaves them; values: address of
    packed values, `[pairs, width]`; corrections: address of float32 `[ROWS]`; out: address of float32 `[ROWS, width]`.
    Does nothing if the processor lacks the instruction.
    """
    return intrinsic(weigh)


weigh_packed_tile = _weigh(is_wide=True)
weigh_narrow_packed_tile = _weigh(is_wide=False)


def _store_packed(context: Any, builder: ir.IRBuilder, weights: list[ir.Value], places: list[ir.Value]) -> None:
    """Write weights as pairs of bfloat16, over the first half of the row's scores."""
    if not has_bfloat16_products():
        store_in_place(context, builder, weights, places)
        return
    join = ir.FunctionType(_HALVES, [FLOATS, FLOATS])
    for index, place in zip(range(0, len(weights), 2), places, strict=False):
        low, high = weights[index : index + 2]
        vec.store(builder, builder.asm(join, "vcvtne2ps2bf16 $2, $1, $0", "=v,v,v", [high, low], False), place)


# A lower degree is enough: these weights are rounded to bfloat16.
softmax_packed_tile = softmax_of(4, _store_packed)


def _constant(tell: Callable[[Any], bool], said: str) -> Any:
    """An intrinsic that takes a number and gives a constant, `tell` of the number's type."""

    def constant(typing_context: Any, element: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            return ir.IntType(1)(int(tell(element)))

        return types.boolean(element), generate

    constant.__doc__ = said
    return intrinsic(constant)


is_float32 = _constant(lambda element: element == types.float32, "Whether elements are float32.")
is_bfloat16 = _constant(lambda element: element == types.uint16, "Whether elements are bfloat16.")
is_packed = _constant(
    lambda element: element == types.uint16 and has_bfloat16_products(),
    "Whether blocks of such elements are packed in pairs.",
)
