"""
What is done with a panel of coded weights, sixteen rows at a time: the product with a few tokens, and decoding.

`panels` says what a panel looks like, `token_rounding` what tokens look like. The sum of a group is one of small
integers: exact, and the same on every processor.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .coded_tiles import codes_in
from .pair_dots import pair_dot, plain_dot
from .quad_dots import quad_dot
from .tiles import load_vectors, reduced
from .token_rounding import QUADS, has_quads
from .vector_ir import CACHE_LINE, FLOAT, FLOATS, INT32, INT64, INTS, LANES

# Of a weight, the best quality first.
WEIGHT_BITS = (8, 4)
# Columns that are decoded at a time; groups are multiples of it.
CHUNK = 32
# Tokens that share what is read of a panel, while their sums are in registers.
TOKENS = (8, 4, 2, 1)
# Panels and tokens of a tile that is square, for codes of 8 bits: each number that is read meets more of the others.
# Not for fewer bits, whose codes would be taken apart for half as many tokens.
SQUARE_BITS, SQUARE = 8, (2, 4)
# How far ahead of its use memory is asked for.
_AHEAD = 4096
# With fewer sums at a time the processor would wait for each.
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
    Write the sixteen outputs of each of a few panels for a few tokens: of one panel for one of `TOKENS`, or `SQUARE`.

    bits: of a code; panel: address of the first, `panel_bytes` before the next; groups: of a row; group_words: rows of
    words in a group; operand: address of rows of integers as `round_group` writes them, `operand_stride` bytes apart,
    one for each token; steps, sums: addresses of float32 rows, `number_stride` bytes apart: what the numbers of each
    group are multiples of, and their sum; out: address of float32 `[tokens, panels, LANES]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, panels, tokens, panel, panel_bytes, groups, group_words, *others = arguments
        operand, operand_stride, steps, sums, number_stride, out = others
        add, multiply = builder.add, builder.mul
        add_products = _products_of_quads if has_quads(context) else _products_of_pairs
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
                    return add_products(context, builder, words, width, places, totals)

                outputs = num_panels * count
                zeros = [vec.ints(0)] * (outputs * _sums_of_output(context, width, outputs))
                sums_of_outputs = _by_output(vec.loop(builder, group_words, zeros, add_words), outputs)
                of_panels = [scales_and_lows(context, builder, start) for start in starts]
                results = []
                for output in range(outputs):
                    token, (scale, low) = output // num_panels, of_panels[output % num_panels]
                    total = _total(context, builder, sums_of_outputs[output])
                    place = add(multiply(INT64(token), number_stride), multiply(group, INT64(4)))
                    step, total_of_numbers = (
                        vec.splat(builder, vec.load(builder, add(numbers, place), FLOAT)) for numbers in (steps, sums)
                    )
                    result = vec.multiply_add(
                        builder, builder.sitofp(total, FLOATS), builder.fmul(scale, step), carried[output]
                    )
                    results.append(vec.multiply_add(builder, low, total_of_numbers, result))
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
    context: Any, builder: ir.IRBuilder, words: list[ir.Value], width: int, places: list[ir.Value], sums: list[ir.Value]
) -> list[ir.Value]:
    """
    Sums, with the products of codes and what tokens have for them, as 16-bit integers.

    words: a row of each panel; places: where the numbers of each token are.
    """
    dot, sums = pair_dot(context) or plain_dot, list(sums)
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
    context: Any, builder: ir.IRBuilder, words: list[ir.Value], width: int, places: list[ir.Value], sums: list[ir.Value]
) -> list[ir.Value]:
    """The same of what tokens have as digits; those with upper digits are in sums of their own."""
    dot, sums = quad_dot(context), list(sums)
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


def _sums_of_output(context: Any, width: int, outputs: int) -> int:
    """How many sums are kept of each, so that no product waits for the one before."""
    if has_quads(context):
        return 2 * max(1, min(len(QUADS[width]), _FEWEST_SUMS // (2 * outputs)))
    return min(16 // width, max(1, _FEWEST_SUMS // outputs))


def _by_output(sums: list[ir.Value], outputs: int) -> list[list[ir.Value]]:
    each = len(sums) // outputs
    return [sums[output * each : (output + 1) * each] for output in range(outputs)]


def _total(context: Any, builder: ir.IRBuilder, sums: list[ir.Value]) -> ir.Value:
    """What the sums of an output add up to."""
    if has_quads(context):
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
    Write what a chunk of `CHUNK` columns of a group of a panel stands for.

    bits: of a code; numbers: address of the group; chunk: index in it; rows: of the panel that are written; out:
    address of the first row's, float32 or bfloat16; row_bytes: between rows; factor: of the weight.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, numbers, chunk, rows, out, row_bytes, factor, is_bfloat16 = arguments
        add, multiply = builder.add, builder.mul
        by = vec.splat(builder, factor)
        scale, low = (builder.fmul(each, by) for each in scales_and_lows(context, builder, numbers))

        def decoded(words: list[ir.Value], width: int) -> list[ir.Value]:
            """The numbers of each column, a vector with one lane for each row."""
            shifts = [place // 2 * width + place % 2 * 16 for place in range(32 // width)]
            codes = [codes_in(builder, row, shift, 2**width - 1) for row in words for shift in shifts]
            return [vec.multiply_add(builder, scale, builder.sitofp(code, FLOATS), low) for code in codes]

        def write(vectors: list[ir.Value], offset: int) -> None:
            """Vectors of columns as sixteen numbers of 32 bits in each row."""
            for row, vector in enumerate(_transposed(builder, vectors)):
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


def _transposed(builder: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """Of sixteen vectors of sixteen lanes."""
    vectors = list(vectors)
    for distance in (8, 4, 2, 1):
        for index in range(LANES):
            if index & distance:
                continue
            a, b = vectors[index], vectors[index + distance]
            firsts = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
            seconds = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
            vectors[index] = vec.shuffle(builder, a, b, firsts)
            vectors[index + distance] = vec.shuffle(builder, a, b, seconds)
    return vectors


def scales_and_lows(context: Any, builder: ir.IRBuilder, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Of the group of a panel that begins at an address."""
    addresses = address, builder.add(address, INT64(2 * LANES))
    scale, low = (load_vectors(context, builder, types.int16, each, 1)[0] for each in addresses)
    return scale, low


def _bfloat16_pair(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Finite floats rounded to the nearest bfloat16, two in 32 bits."""
    first, second = (vec.rounded_to_bfloat16(builder, numbers) for numbers in (low, high))
    return builder.or_(builder.lshr(first, vec.ints(16)), builder.and_(second, vec.ints(0xFFFF0000)))
