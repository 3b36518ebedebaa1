"""
The three steps of attention for a tile: four query rows and one block of 64 tokens, of one KV head.

The accumulators of a tile stay in registers: four rows by 64 columns are sixteen of the 32 registers of AVX-512. With
fewer or narrower registers a tile is 16 columns wide. Addresses are integers, because Numba has no name for some
element types.

Element types: `float32`; `uint16` is bfloat16, the upper half of a float32; `int16` is IEEE half precision.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..blocks import BLOCK
from . import vector_ir as vec
from .processor import has_feature
from .vector_ir import FLOAT, FLOATS, INT16, INT64, INTS, LANES

ROWS = 4
LOG2_E = math.log2(math.e)
_ITEM_BYTES = {types.float32: 4, types.uint16: 2, types.int16: 2}


def wide_vectors(context: Any) -> int:
    """Number of vectors of sixteen in a row of a wide tile, whose accumulators fit the registers."""
    return 4 if has_feature(context, "avx512f") else 1


@intrinsic
def tile_columns(typing_context: Any) -> Any:
    """Number of columns of a wide tile, a constant of the processor."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return INT64(wide_vectors(context) * LANES)

    return types.int64(), generate


@intrinsic
def pointer(typing_context: Any, address: Any, element: Any) -> Any:
    """The address as a pointer to elements of the type of `element`."""
    kind = types.CPointer(element)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, element), generate


@intrinsic
def nearest(typing_context: Any, number: Any) -> Any:
    """The nearest integer of a float32, as float32; of two, the even one. `np.rint` would call a function."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return vec.call(builder, "llvm.rint.f32", FLOAT, *arguments)

    return types.float32(types.float32), generate


def _score(wide: bool) -> Any:
    def score(
        typing_context: Any,
        element: Any,
        query: Any,
        stride: Any,
        keys: Any,
        head_dim: Any,
        scores: Any,
        column: Any,
        ahead: Any,
    ) -> Any:
        item = _ITEM_BYTES[element]

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            _, query, stride, keys, head_dim, scores, column, ahead = arguments
            vectors = wide_vectors(context) if wide else 1
            add, multiply = builder.add, builder.mul
            first = multiply(column, INT64(item))

            def body(d: ir.Value, accumulators: list[ir.Value]) -> list[ir.Value]:
                offset = add(multiply(d, INT64(BLOCK * item)), first)
                loaded = load_vectors(context, builder, element, add(keys, offset), vectors)
                vec.prefetch(builder, add(ahead, offset), vectors * LANES * item)
                results = []
                for row in range(ROWS):
                    position = add(multiply(INT64(row), stride), multiply(d, INT64(4)))
                    number = vec.splat(builder, vec.load(builder, add(query, position), FLOAT))
                    for key, accumulator in zip(loaded, accumulators[row * vectors :], strict=False):
                        results.append(vec.multiply_add(builder, number, key, accumulator))
                return results

            results = vec.loop(builder, head_dim, [vec.floats(0.0)] * (ROWS * vectors), body)
            results = _in_order(builder, element, results, vectors)
            for index, result in enumerate(results):
                row, vector = divmod(index, vectors)
                offset = add(multiply(column, INT64(4)), INT64((row * BLOCK + vector * LANES) * 4))
                vec.store(builder, result, add(scores, offset))
            return context.get_dummy_value()

        integers = [types.int64] * 7
        return types.void(element, *integers), generate

    score.__doc__ = f"""
    Write `scores[:, column : column + {"tile_columns()" if wide else LANES}] = query @ keys[:, ...]`.

    query: address of float32 rows, `stride` bytes apart, each `[head_dim]`; keys: address of one block of `element`,
    `[head_dim, BLOCK]`; scores: address of float32 `[ROWS, BLOCK]`; ahead: address to prefetch, row by row.
    """
    return intrinsic(score)


score_tile = _score(wide=True)
score_narrow_tile = _score(wide=False)


def softmax_of(
    degree: int, store_row: Callable[[Any, ir.IRBuilder, list[ir.Value], list[ir.Value]], None]
) -> Callable[..., Any]:
    """
    An intrinsic that turns scores into weights relative to a running maximum (online softmax, arXiv:1805.02867).

    It makes weights `2 ** (factor * scores - maximum)`, updates the maximum and the sum of each row for this block, and
    writes the factor that corrects earlier sums, which are relative to the old maximum. If a score of a row is NaN, the
    sum of the row becomes NaN.

    The intrinsic takes: scores, address of float32 `[ROWS, BLOCK]`; factor; maxima, sums, corrections: addresses of
    float32 `[ROWS]`.

    Args:
        degree: of the polynomial, see `vector_ir.exp2`.
        store_row: writes the weights of a row, given the addresses of their scores.
    """

    def softmax_tile(typing_context: Any, scores: Any, factor: Any, maxima: Any, sums: Any, corrections: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            scores, factor, maxima, sums, corrections = arguments
            # The maximum is of the scaled scores themselves, so no exponent is above 0, however large the scores.
            factor, rows = vec.splat(builder, factor), score_places(builder, scores)
            scaled = [[builder.fmul(vec.load(builder, place, FLOATS), factor) for place in row] for row in rows]
            highest = vec.fold(builder, [reduced(builder, row, vec.maximum) for row in scaled], vec.maximum)
            old = vec.load_four(builder, maxima)
            new = vec.maximum(builder, highest, old)
            vec.store_four(builder, new, maxima)
            base = base_of(builder, new)
            correction = vec.exp2(context, builder, builder.fsub(old, base), 6)
            vec.store_four(builder, correction, corrections)
            added = []
            for row, (places, vectors) in enumerate(zip(rows, scaled, strict=True)):
                row_base = vec.splat_fourth(builder, base, row)
                weights = [vec.exp2(context, builder, builder.fsub(vector, row_base), degree) for vector in vectors]
                store_row(context, builder, weights, places)
                added.append(reduced(builder, weights, vec.add))
            before = builder.fmul(vec.load_four(builder, sums), correction)
            vec.store_four(builder, builder.fadd(before, vec.fold(builder, added, vec.add)), sums)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), generate

    made: Callable[..., Any] = intrinsic(softmax_tile)
    return made


def store_in_place(context: Any, builder: ir.IRBuilder, weights: list[ir.Value], places: list[ir.Value]) -> None:
    for weight, place in zip(weights, places, strict=True):
        vec.store(builder, weight, place)


softmax_tile = softmax_of(6, store_in_place)


def score_places(builder: ir.IRBuilder, scores: ir.Value) -> list[list[ir.Value]]:
    """Addresses of the vectors of scores, `[ROWS, BLOCK]`, by row."""
    starts = [[INT64((row * BLOCK + first) * 4) for first in range(0, BLOCK, LANES)] for row in range(ROWS)]
    return [[builder.add(scores, start) for start in row] for row in starts]


def base_of(builder: ir.IRBuilder, maxima: ir.Value) -> ir.Value:
    """The number to subtract from exponents: the maximum, or 0 if a row sees no token, because -inf - -inf is NaN."""
    nothing = builder.fcmp_ordered("==", maxima, vec.floats(float("-inf")))
    return builder.select(nothing, vec.floats(0.0), maxima)


def reduced(builder: ir.IRBuilder, vectors: list[ir.Value], operation: Any) -> ir.Value:
    """Fold vectors into one, lane by lane."""
    return functools.reduce(functools.partial(operation, builder), vectors)


def _weigh(wide: bool) -> Any:
    def weigh(
        typing_context: Any,
        element: Any,
        weights: Any,
        values: Any,
        num_tokens: Any,
        width: Any,
        column: Any,
        corrections: Any,
        out: Any,
        ahead: Any,
    ) -> Any:
        item = _ITEM_BYTES[element]

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            _, weights, values, num_tokens, width, column, corrections, out, ahead = arguments
            vectors = wide_vectors(context) if wide else 1
            add, multiply = builder.add, builder.mul
            outputs, sums = [], []
            for row in range(ROWS):
                correction = vec.splat(builder, vec.load(builder, add(corrections, INT64(row * 4)), FLOAT))
                start = add(multiply(INT64(row), width), column)
                for vector in range(vectors):
                    address = add(out, multiply(add(start, INT64(vector * LANES)), INT64(4)))
                    outputs.append(address)
                    sums.append(builder.fmul(vec.load(builder, address, FLOATS), correction))
            sums = _as_loaded(builder, element, sums, vectors)

            def body(token: ir.Value, accumulators: list[ir.Value]) -> list[ir.Value]:
                offset = multiply(add(multiply(token, width), column), INT64(item))
                loaded = load_vectors(context, builder, element, add(values, offset), vectors)
                vec.prefetch(builder, add(ahead, offset), vectors * LANES * item)
                results = []
                for row in range(ROWS):
                    position = add(INT64(row * BLOCK * 4), multiply(token, INT64(4)))
                    weight = vec.splat(builder, vec.load(builder, add(weights, position), FLOAT))
                    for value, accumulator in zip(loaded, accumulators[row * vectors :], strict=False):
                        results.append(vec.multiply_add(builder, weight, value, accumulator))
                return results

            results = _in_order(builder, element, vec.loop(builder, num_tokens, sums, body), vectors)
            for result, address in zip(results, outputs, strict=True):
                vec.store(builder, result, address)
            return context.get_dummy_value()

        integers = [types.int64] * 8
        return types.void(element, *integers), generate

    weigh.__doc__ = f"""
    Correct `out[:, column : column + {"tile_columns()" if wide else LANES}]` and add `weights @ values` to it.

    weights: address of float32 `[ROWS, BLOCK]`; values: address of one block of `element`, `[BLOCK, width]`, of which
    the first `num_tokens` rows are read; corrections: address of float32 `[ROWS]`; out: address of float32
    `[ROWS, width]`; ahead: address to prefetch, row by row.
    """
    return intrinsic(weigh)


weigh_tile = _weigh(wide=True)
weigh_narrow_tile = _weigh(wide=False)


def _are_paired(dtype: Any, count: int) -> bool:
    """Whether `load_vectors` gives the even and the odd elements of 32, instead of the first and the last sixteen."""
    return dtype == types.uint16 and count > 1


def _in_order(builder: ir.IRBuilder, dtype: Any, vectors: list[ir.Value], count: int) -> list[ir.Value]:
    """Bring vectors from the order of `load_vectors`, of `count` vectors each, to the order of memory."""
    if not _are_paired(dtype, count):
        return vectors
    mixed = [lane // 2 + lane % 2 * LANES for lane in range(2 * LANES)]
    halves = mixed[:LANES], mixed[LANES:]
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [vec.shuffle(builder, even, odd, half) for even, odd in pairs for half in halves]


def _as_loaded(builder: ir.IRBuilder, dtype: Any, vectors: list[ir.Value], count: int) -> list[ir.Value]:
    """Bring vectors from the order of memory to the order of `load_vectors`: the inverse of `_in_order`."""
    if not _are_paired(dtype, count):
        return vectors
    halves = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [vec.shuffle(builder, first, last, half) for first, last in pairs for half in halves]


def load_vectors(context: Any, builder: ir.IRBuilder, dtype: Any, address: ir.Value, count: int) -> list[ir.Value]:
    """Load `count` consecutive vectors of sixteen elements as floats; see `_are_paired` for the order."""
    step = LANES * _ITEM_BYTES[dtype]
    if _are_paired(dtype, count):
        # Each of the two elements in 32 bits becomes a float by one instruction.
        twos = [vec.load(builder, builder.add(address, INT64(index * 2 * step)), INTS) for index in range(count // 2)]
        evens = [builder.shl(each, vec.ints(16)) for each in twos]
        odds = [builder.and_(each, vec.ints(0xFFFF0000)) for each in twos]
        return [builder.bitcast(half, FLOATS) for pair in zip(evens, odds, strict=True) for half in pair]
    addresses = [builder.add(address, INT64(index * step)) for index in range(count)]
    if dtype == types.float32:
        return [vec.load(builder, each, FLOATS) for each in addresses]
    if dtype == types.int16 and has_feature(context, "f16c"):
        halves = ir.VectorType(ir.HalfType(), LANES)
        return [builder.fpext(vec.load(builder, each, halves), FLOATS) for each in addresses]
    bits = [builder.zext(vec.load(builder, each, ir.VectorType(INT16, LANES)), INTS) for each in addresses]
    if dtype == types.uint16:
        return [builder.bitcast(builder.shl(each, vec.ints(16)), FLOATS) for each in bits]
    return [_half_to_float(builder, each) for each in bits]


def _half_to_float(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Convert half precision by integer arithmetic: shift the exponent into place and correct its bias."""
    magnitude = builder.bitcast(builder.shl(builder.and_(bits, vec.ints(0x7FFF)), vec.ints(13)), FLOATS)
    number = builder.bitcast(builder.fmul(magnitude, vec.floats(2.0**112)), INTS)
    exponent = builder.and_(bits, vec.ints(0x7C00))
    not_finite = builder.icmp_unsigned("==", exponent, vec.ints(0x7C00))
    number = builder.select(not_finite, builder.or_(number, vec.ints(0x7F800000)), number)
    sign = builder.shl(builder.and_(bits, vec.ints(0x8000)), vec.ints(16))
    return builder.bitcast(builder.or_(number, sign), FLOATS)


@intrinsic
def widen(typing_context: Any, element: Any, source: Any, count: Any, target: Any) -> Any:
    """
    Write numbers of `element` as float32.

    source, target: addresses; count: of numbers, a positive multiple of sixteen.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _, source, count, target = arguments

        def body(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            place = builder.add(source, builder.mul(index, INT64(LANES * _ITEM_BYTES[element])))
            [numbers] = load_vectors(context, builder, element, place, 1)
            vec.store(builder, numbers, builder.add(target, builder.mul(index, INT64(LANES * 4))))
            return []

        vec.loop(builder, builder.sdiv(count, INT64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(element, *[types.int64] * 3), generate
