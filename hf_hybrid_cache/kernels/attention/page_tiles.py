"""Sums of a block's pages for four query rows, by which the selection chooses the pages to read."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..blocks import BLOCK
from ..vector import vector_ir as vec
from ..vector.tiles import ROWS, load_vectors, score_places
from ..vector.vector_ir import FLOATS, INT32, INT64, LANES

# Tokens of a page: one vector, and one chunk of quantized values.
PAGE = LANES
PAGES = BLOCK // PAGE


@intrinsic
def scale_scores(typing_context: Any, scores: Any, query: Any, stride: Any, scales: Any, means: Any, inner: Any) -> Any:
    """
    Turn products of four query rows with the codes of an index into scores.

    A score is the product times the scale of the token, plus the product of the query with the mean of the block.

    scores: address of float32 `[ROWS, BLOCK]`; query: address of float32 rows, `stride` bytes apart, each `[inner]`;
    scales: address of bfloat16 `[BLOCK]`; means: of bfloat16 `[inner]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        places = score_places(builder, arguments[0])
        for row, vectors in zip(places, _scores(context, builder, *arguments), strict=True):
            for place, vector in zip(row, vectors, strict=True):
                vec.store(builder, vector, place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def page_tile(typing_context: Any, scores: Any, factor: Any, bases: Any, totals: Any, page_sums: Any) -> Any:
    """
    Sum, for each row and each page of a block, 2 to the power of the scores relative to the row's base.

    Powers are exact to 2e-3. A sum of several powers near 2^127 is infinite.

    scores: address of float32 `[ROWS, BLOCK]`; factor: of the scores, in the exponent; bases: address of float32
    `[ROWS]`; page_sums: address of float32 `[ROWS, PAGES]`, written; totals: address of float32 `[ROWS, PAGES]`, to
    which the page sums are added.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores, factor, *rest = arguments
        rows = [[vec.load(builder, place, FLOATS) for place in row] for row in score_places(builder, scores)]
        _add_up_pages(context, builder, rows, factor, *rest)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, *[types.int64] * 3), generate


@intrinsic
def scaled_page_tile(
    typing_context: Any,
    scores: Any,
    query: Any,
    stride: Any,
    scales: Any,
    means: Any,
    inner: Any,
    factor: Any,
    bases: Any,
    totals: Any,
    page_sums: Any,
) -> Any:
    """Run `scale_scores` and then `page_tile`, without writing the scores."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _add_up_pages(context, builder, _scores(context, builder, *arguments[:6]), *arguments[6:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32, *[types.int64] * 3), generate


def _scores(
    context: Any,
    builder: ir.IRBuilder,
    scores: ir.Value,
    query: ir.Value,
    stride: ir.Value,
    scales: ir.Value,
    means: ir.Value,
    inner: ir.Value,
) -> list[list[ir.Value]]:
    """The scores that `scale_scores` writes, by row and page."""
    add, multiply = builder.add, builder.mul

    def loaded(start: ir.Value, offset: ir.Value) -> ir.Value:
        return load_vectors(context, builder, types.uint16, add(start, offset), 1)[0]

    def body(chunk: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        mean = loaded(means, multiply(chunk, INT64(LANES * 2)))
        results = []
        for row in range(ROWS):
            place = add(query, add(multiply(INT64(row), stride), multiply(chunk, INT64(LANES * 4))))
            results.append(vec.multiply_add(builder, vec.load(builder, place, FLOATS), mean, sums[row]))
        return results

    sums = vec.loop(builder, builder.sdiv(inner, INT64(LANES)), [vec.floats(0.0)] * ROWS, body)
    of_mean = vec.fold(builder, sums, vec.add)
    of_tokens = [loaded(scales, INT64(first * 2)) for first in range(0, BLOCK, PAGE)]
    results = []
    for row, places in enumerate(score_places(builder, scores)):
        added = vec.splat_fourth(builder, of_mean, row)
        pairs = zip(places, of_tokens, strict=True)
        results.append([vec.multiply_add(builder, vec.load(builder, at, FLOATS), scale, added) for at, scale in pairs])
    return results


def _add_up_pages(
    context: Any,
    builder: ir.IRBuilder,
    rows: list[list[ir.Value]],
    factor: ir.Value,
    bases: ir.Value,
    totals: ir.Value,
    page_sums: ir.Value,
) -> None:
    """Sum up pages as `page_tile` does, for scores by row and page."""
    factor = vec.splat(builder, factor)
    base = vec.load_four(builder, bases)
    added = []
    for row, vectors in enumerate(rows):
        lowered = builder.fneg(vec.splat_fourth(builder, base, row))
        powers = [
            vec.rough_exp2(context, builder, vec.multiply_add(builder, each, factor, lowered)) for each in vectors
        ]
        added.append(vec.fold(builder, powers, vec.add))  # a page in each four lanes
    fourths = range(0, LANES, 4)
    pairs = [
        vec.shuffle(builder, added[row], added[row + 1], [*fourths, *(LANES + lane for lane in fourths)])
        for row in range(0, ROWS, 2)
    ]
    of_pages = vec.shuffle(builder, pairs[0], pairs[1], range(LANES))
    vec.store(builder, of_pages, page_sums)
    vec.store(builder, builder.fadd(vec.load(builder, totals, FLOATS), of_pages), totals)


@intrinsic
def hide_pages(typing_context: Any, scores: Any, first: Any, end: Any) -> Any:
    """
    Set the scores of all pages before `first`, and from `end` on, to minus infinity. Scores are not scaled yet.

    scores: address of float32 `[ROWS, BLOCK]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores, first, end = arguments
        for page in range(PAGES):
            is_before = builder.icmp_signed("<", INT64(page), first)
            with builder.if_then(builder.or_(is_before, builder.icmp_signed(">=", INT64(page), end))):
                for row in range(ROWS):
                    place = builder.add(scores, INT64((row * BLOCK + page * PAGE) * 4))
                    vec.store(builder, vec.floats(float("-inf")), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def float_bits(typing_context: Any, number: Any) -> Any:
    """The bits of a float32. For numbers of at least 0 the bits sort as the numbers do."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.zext(builder.bitcast(arguments[0], INT32), INT64)

    return types.int64(types.float32), generate
