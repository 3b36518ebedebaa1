"""
Products of panels of a quantized weight with a few tokens.

`forms.panels` describes a panel, `operands` the rounded tokens. The sum of a group is of small integers: it is
exact, and the same on every processor.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..forms.panels import QUADS, for_width, pairs_of_codes, quads_of_codes, scales_and_minima
from ..vector import vector_ir as vec
from ..vector.dots import dot_with_quad, pair_dot, plain_dot
from ..vector.processor import has_gemm
from ..vector.vector_ir import CACHE_LINE, FLOAT, FLOATS, INT32, INT64, INTS, LANES, reduced

# Numbers of tokens that share the loads of a panel; their sums stay in registers.
TOKENS = (8, 4, 2, 1)
# Panels and tokens of a square tile, for codes of 8 bits: each load serves more products. Codes of fewer bits are taken
# out of their words, which half as many tokens would share.
SQUARE_BITS, SQUARE = 8, (2, 4)
# Bytes between the memory that is read and the memory that is prefetched.
_AHEAD = 4096
# With fewer sums in turn, a product would wait for the one before it.
_FEWEST_SUMS = 4


@intrinsic
def multiply_panels(
    typing_context: Any,
    bits: Any,
    panels: Any,
    tokens: Any,
    panel: Any,
    panel_bytes: Any,
    groups: Any,
    group_words: Any,
    operand: Any,
    operand_stride: Any,
    steps: Any,
    sums: Any,
    number_stride: Any,
    out: Any,
) -> Any:
    """
    Write the sixteen outputs of each panel of a tile for each of its tokens.

    bits: of a code; panels, tokens: numbers of them, 1 and one of `TOKENS`, or `SQUARE`; panel: address of the first,
    `panel_bytes` before the next; groups: number of them in a row; group_words: rows of words in a group; operand:
    address of the integers of `round_group`, a row for each token, `operand_stride` bytes apart; steps, sums: addresses
    of the float32 of `round_group` for each group, a row for each token, `number_stride` bytes apart; out: address of
    float32 `[tokens, panels, LANES]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, panels, tokens, panel, panel_bytes, groups, group_words, *others = arguments
        operand, operand_stride, steps, sums, number_stride, out = others
        add, multiply = builder.add, builder.mul
        group_bytes = multiply(add(group_words, INT64(1)), INT64(CACHE_LINE))

        def run(width: int, num_panels: int, count: int) -> None:
            word_bytes = INT64(64 // width)
            firsts = [add(panel, multiply(INT64(index), panel_bytes)) for index in range(num_panels)]

            def add_group(group: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                starts = [add(each, multiply(group, group_bytes)) for each in firsts]
                first = multiply(multiply(group, group_words), word_bytes)
                for start in starts:
                    vec.prefetch(builder, add(start, INT64(_AHEAD)), 1)

                def add_words(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                    line = multiply(add(index, INT64(1)), INT64(CACHE_LINE))
                    addresses = [add(start, line) for start in starts]
                    words = [vec.load(builder, address, INTS) for address in addresses]
                    for address in addresses:
                        vec.prefetch(builder, add(address, INT64(_AHEAD)), 1)
                    position = add(operand, add(first, multiply(index, word_bytes)))
                    places = [add(position, multiply(INT64(token), operand_stride)) for token in range(count)]
                    return _add_products(builder, words, width, places, totals)

                outputs = num_panels * count
                zeros = [vec.ints(0)] * (outputs * _sums_of_output(width, outputs))
                sums_of_outputs = _by_output(vec.loop(builder, group_words, zeros, add_words), outputs)
                of_panels = [scales_and_minima(context, builder, start) for start in starts]
                results = []
                for output in range(outputs):
                    token, (scale, minimum) = output // num_panels, of_panels[output % num_panels]
                    total = _total(builder, sums_of_outputs[output])
                    place = add(multiply(INT64(token), number_stride), multiply(group, INT64(4)))
                    step, total_of_numbers = (
                        vec.splat(builder, vec.load(builder, add(numbers, place), FLOAT)) for numbers in (steps, sums)
                    )
                    result = vec.multiply_add(
                        builder, builder.sitofp(total, FLOATS), builder.fmul(scale, step), carried[output]
                    )
                    results.append(vec.multiply_add(builder, minimum, total_of_numbers, result))
                return results

            results = vec.loop(builder, groups, [vec.floats(0.0)] * (num_panels * count), add_group)
            for output, result in enumerate(results):
                vec.store(builder, result, add(out, INT64(output * LANES * 4)))

        def run_tile(width: int) -> None:
            for tile in [(1, count) for count in TOKENS] + [SQUARE] * (width == SQUARE_BITS):
                has_panels, has_tokens = (
                    builder.icmp_signed("==", given, INT64(number))
                    for given, number in zip((panels, tokens), tile, strict=True)
                )
                with builder.if_then(builder.and_(has_panels, has_tokens)):
                    run(width, *tile)

        for_width(builder, bits, run_tile)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13), generate


def _add_products(
    builder: ir.IRBuilder, words: list[ir.Value], width: int, places: list[ir.Value], sums: list[ir.Value]
) -> list[ir.Value]:
    """
    Add the products of codes with the integers of tokens to `sums`, with AVX512-VNNI of both digits separately.

    words: a row of words of each panel; places: address of the integers of each token.
    """
    dot, codes_of, digits = (dot_with_quad, quads_of_codes, 2) if has_gemm() else (_dot_with_pair, pairs_of_codes, 1)
    sums = list(sums)
    chains = len(sums) // len(places) // len(words)
    for index, codes_of_panels in enumerate(zip(*(codes_of(builder, each, width) for each in words), strict=True)):
        for token, place in enumerate(places):
            for step in range(digits * index, digits * (index + 1)):
                for panel, codes in enumerate(codes_of_panels):
                    chain = (token * len(words) + panel) * chains + step % chains
                    sums[chain] = dot(builder, codes, place, 4 * step, sums[chain])
    return sums


def _dot_with_pair(builder: ir.IRBuilder, codes: ir.Value, address: ir.Value, offset: int, total: ir.Value) -> ir.Value:
    """`total` plus the products of two codes in each lane with a pair in memory."""
    pair = vec.splat(builder, vec.load(builder, builder.add(address, INT64(offset)), INT32))
    return (pair_dot() or plain_dot)(builder, codes, pair, total)


def _sums_of_output(width: int, outputs: int) -> int:
    """Number of sums for each output, so that no product waits for the one before it."""
    if has_gemm():
        return 2 * max(1, min(len(QUADS[width]), _FEWEST_SUMS // (2 * outputs)))
    return min(16 // width, max(1, _FEWEST_SUMS // outputs))


def _by_output(sums: list[ir.Value], outputs: int) -> list[list[ir.Value]]:
    each = len(sums) // outputs
    return [sums[output * each : (output + 1) * each] for output in range(outputs)]


def _total(builder: ir.IRBuilder, sums: list[ir.Value]) -> ir.Value:
    """The total of the sums of an output."""
    if has_gemm():
        upper, lower = (reduced(builder, sums[digit::2], ir.IRBuilder.add) for digit in range(2))
        return builder.add(builder.shl(upper, vec.ints(8)), lower)
    return reduced(builder, sums, ir.IRBuilder.add)
