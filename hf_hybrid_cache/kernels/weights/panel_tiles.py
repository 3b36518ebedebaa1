"""
Products of a panel of quantized weights, which is sixteen rows, with a few tokens, and its dequantization.

`panels` describes a panel, `token_rounding` the rounded tokens. The sum of a group is of small integers: it is exact,
and the same on every processor.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..quantized.quantized_tiles import codes_in
from ..vector import vector_ir as vec
from ..vector.pair_dots import pair_dot, plain_dot
from ..vector.processor import has_gemm
from ..vector.quad_dots import quad_dot
from ..vector.tiles import load_vectors, reduced
from ..vector.transposition import transposed
from ..vector.vector_ir import CACHE_LINE, FLOAT, FLOATS, INT32, INT64, INTS, LANES
from .token_rounding import QUADS

# Bits of a code of a weight, the best quality first.
WEIGHT_BITS = (8, 4)
# Columns that are dequantized at a time; groups are multiples of it.
CHUNK = 32
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
        add_products = _products_of_quads if has_gemm() else _products_of_pairs
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
                    return add_products(builder, words, width, places, totals)

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

        for width in WEIGHT_BITS:
            for tile in [(1, tokens) for tokens in TOKENS] + [SQUARE] * (width == SQUARE_BITS):
                asked = zip((bits, panels, tokens), (width, *tile), strict=True)
                is_it = [builder.icmp_signed("==", given, INT64(number)) for given, number in asked]
                with builder.if_then(builder.and_(is_it[0], builder.and_(is_it[1], is_it[2]))):
                    run(width, *tile)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13), generate


def _products_of_pairs(
    builder: ir.IRBuilder, words: list[ir.Value], width: int, places: list[ir.Value], sums: list[ir.Value]
) -> list[ir.Value]:
    """
    Add the products of codes with the 16-bit integers of tokens to `sums`.

    words: a row of words of each panel; places: address of the integers of each token.
    """
    dot, sums = pair_dot() or plain_dot, list(sums)
    chains = len(sums) // len(places) // len(words)
    for pair in range(16 // width):
        codes_of_panels = [codes_in(builder, each, pair * width, (2**width - 1) * 0x10001) for each in words]
        for token, place in enumerate(places):
            number = vec.splat(builder, vec.load(builder, builder.add(place, INT64(4 * pair)), INT32))
            for panel, codes in enumerate(codes_of_panels):
                chain = (token * len(words) + panel) * chains + pair % chains
                sums[chain] = dot(builder, codes, number, sums[chain])
    return sums


def _products_of_quads(
    builder: ir.IRBuilder, words: list[ir.Value], width: int, places: list[ir.Value], sums: list[ir.Value]
) -> list[ir.Value]:
    """Add the products of codes with the 8-bit digits of tokens to `sums`, separately for upper and lower digits."""
    dot, sums = quad_dot(), list(sums)
    assert dot is not None
    chains = len(sums) // len(places) // len(words)
    for quad in range(len(QUADS[width])):
        codes_of_panels = [each if width == 8 else codes_in(builder, each, quad * width, 0x0F0F0F0F) for each in words]
        for token, place in enumerate(places):
            for digit in range(2):
                at = builder.add(place, INT64(8 * quad + 4 * digit))
                number = vec.splat(builder, vec.load(builder, at, INT32))
                for panel, codes in enumerate(codes_of_panels):
                    chain = (token * len(words) + panel) * chains + (2 * quad + digit) % chains
                    sums[chain] = dot(builder, [(codes, number)], sums[chain])
    return sums


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


@intrinsic
def decode_chunk(
    typing_context: Any,
    bits: Any,
    numbers: Any,
    chunk: Any,
    rows: Any,
    out: Any,
    row_bytes: Any,
    factor: Any,
    is_bfloat16: Any,
) -> Any:
    """
    Dequantize a chunk of `CHUNK` columns of a group of a panel.

    bits: of a code; numbers: address of the group; chunk: its index in the group; rows: number of rows to write; out:
    address of the first row, float32 or bfloat16; row_bytes: between rows; factor: of the weight.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, numbers, chunk, rows, out, row_bytes, factor, is_bfloat16 = arguments
        add, multiply = builder.add, builder.mul
        by = vec.splat(builder, factor)
        scale, minimum = (builder.fmul(each, by) for each in scales_and_minima(context, builder, numbers))

        def decoded(words: list[ir.Value], width: int) -> list[ir.Value]:
            """The dequantized columns: a vector for each, with a lane for each row."""
            shifts = [place // 2 * width + place % 2 * 16 for place in range(32 // width)]
            codes = [codes_in(builder, row, shift, 2**width - 1) for row in words for shift in shifts]
            return [vec.multiply_add(builder, scale, builder.sitofp(code, FLOATS), minimum) for code in codes]

        def write(vectors: list[ir.Value], offset: int) -> None:
            """Write vectors of columns as sixteen numbers of 32 bits in each row."""
            for row, vector in enumerate(transposed(builder, vectors)):
                with builder.if_then(builder.icmp_signed("<", INT64(row), rows)):
                    vec.store(builder, vector, add(out, add(multiply(INT64(row), row_bytes), INT64(offset))))

        for width in WEIGHT_BITS:
            with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
                first = add(add(numbers, INT64(CACHE_LINE)), multiply(chunk, INT64(CHUNK * width // 32 * CACHE_LINE)))
                words = [
                    vec.load(builder, add(first, INT64(index * CACHE_LINE)), INTS)
                    for index in range(CHUNK * width // 32)
                ]
                columns = decoded(words, width)
                with builder.if_else(is_bfloat16) as (then, otherwise):
                    with then:
                        pairs = zip(columns[::2], columns[1::2], strict=True)
                        write([_bfloat16_pair(builder, *pair) for pair in pairs], 0)
                    with otherwise:
                        for half in range(2):
                            part = columns[half * LANES : (half + 1) * LANES]
                            write([builder.bitcast(each, INTS) for each in part], half * LANES * 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32, types.boolean), generate


def scales_and_minima(context: Any, builder: ir.IRBuilder, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Load the scales and the minima of the group of a panel that begins at an address."""
    addresses = address, builder.add(address, INT64(2 * LANES))
    scale, minimum = (load_vectors(context, builder, types.int16, each, 1)[0] for each in addresses)
    return scale, minimum


def _bfloat16_pair(builder: ir.IRBuilder, minimum: ir.Value, high: ir.Value) -> ir.Value:
    """Round two vectors of finite floats to bfloat16, and join them in lanes of 32 bits."""
    first, second = (vec.rounded_to_bfloat16(builder, numbers) for numbers in (minimum, high))
    return builder.or_(builder.lshr(first, vec.ints(16)), builder.and_(second, vec.ints(0xFFFF0000)))
