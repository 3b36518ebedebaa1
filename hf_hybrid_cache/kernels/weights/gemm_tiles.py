"""
Products of many tokens with quantized weights, in integers of 8 bits: six tokens and two panels at a time.

A token is rounded in chunks of 32 columns to `step * (q + zero)`, q of 8 bits with a sign and `zero` an integer. A
weight is `minimum + scale * code`. So a chunk adds `scale * step * sum((q + zero) * code) + minimum * total`. The sum
is of integers, four products in an instruction; `total` is the sum of the rounded numbers. `panels` describes a panel,
`token_rounding` the order of its codes in words.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..quantized.quantized_tiles import codes_in
from ..vector import vector_ir as vec
from ..vector.processor import has_gemm
from ..vector.quad_dots import quad_dot
from ..vector.tiles import load_vectors, reduced
from ..vector.vector_ir import CACHE_LINE, FLOAT, FLOATS, INT8, INT32, INT64, INTS, LANES
from .panel_tiles import CHUNK, WEIGHT_BITS, scales_and_minima
from .token_rounding import INFINITE, QUADS

# A tile of these panels and tokens has as many sums, of integers and of floats, as there are registers for.
GEMM_PANELS, GEMM_TOKENS = 2, 6
# Numbers of a chunk: of each panel scales, minima and sums of codes; of each token its step, total and zero.
PANEL_NUMBERS, TOKEN_NUMBERS = 3, 3
# Steps between the least and the largest integer of 8 bits, less one because both ends are rounded.
_STEPS = 254.0
# With a larger zero, 8 bits would be finer than float32 needs.
_LARGEST_ZERO = 2.0**15


@intrinsic
def round_chunk(
    typing_context: Any, bits: Any, numbers: Any, is_bfloat16: Any, integers: Any, token_numbers: Any
) -> Any:
    """
    Write the 8-bit integers of a chunk of a token, and its step, total and zero.

    bits: of a code of the weight; numbers: address of float32 or bfloat16 `[CHUNK]`; integers: address of int8
    `[CHUNK]`, in the order of the codes; token_numbers: address of the token's step, float32; total and zero follow,
    `GEMM_TOKENS` numbers apart. The step is NaN if a number is infinite or NaN.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, numbers, is_bfloat16, integers, token_numbers = arguments

        def run(kind: Any) -> None:
            size_of_item = {types.float32: 4, types.uint16: 2}[kind]
            starts = [builder.add(numbers, INT64(first * size_of_item)) for first in range(0, CHUNK, LANES)]
            vectors = [load_vectors(context, builder, kind, start, 1)[0] for start in starts]
            high, minus_minimum = _extremes(builder, vectors)
            largest = _larger(builder, high, minus_minimum)
            # Multiply before the sum, which may overflow.
            part = FLOAT(1 / _STEPS)
            step = builder.fadd(builder.fmul(high, part), builder.fmul(minus_minimum, part))
            step = _larger(builder, step, builder.fmul(largest, FLOAT(1 / _LARGEST_ZERO)))
            counts = builder.fcmp_ordered(">", step, FLOAT(vec.NEGLIGIBLE))
            factor = builder.select(counts, builder.fdiv(FLOAT(1.0), step), FLOAT(0.0))
            factors = vec.splat(builder, factor)
            minimum = vec.splat(builder, builder.fneg(minus_minimum))
            zeros = builder.add(vec.nearest_integers(builder, minimum, factors), vec.ints(128))
            nearest = [vec.nearest_integers(builder, vector, factors) for vector in vectors]
            narrow = [builder.trunc(builder.sub(each, zeros), ir.VectorType(INT8, LANES)) for each in nearest]
            for width in QUADS:
                with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
                    vec.store(builder, vec.shuffle(builder, narrow[0], narrow[1], _order_of_quads(width)), integers)
            step = builder.select(_are_finite(builder, vectors), step, FLOAT(float("nan")))
            zero = builder.extract_element(zeros, INT32(0))
            sums = reduced(builder, nearest, ir.IRBuilder.add)
            total = builder.sitofp(vec.call(builder, "llvm.vector.reduce.add.v16i32", INT32, sums), FLOAT)
            for index, number in enumerate((step, builder.fmul(step, total), zero)):
                vec.store(builder, number, builder.add(token_numbers, INT64(index * GEMM_TOKENS * 4)))

        with builder.if_else(is_bfloat16) as (then, otherwise):
            with then:
                run(types.uint16)
            with otherwise:
                run(types.float32)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean, types.int64, types.int64), generate


def _extremes(builder: ir.IRBuilder, vectors: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """The largest number, and the negative of the least number, by the same instructions."""
    turned = [builder.fneg(vector) for vector in vectors]
    high, minus_minimum = (reduced(builder, each, vec.maximum) for each in (vectors, turned))
    half = LANES // 2
    firsts, seconds = (
        [*range(half), *range(LANES, LANES + half)],
        [*range(half, LANES), *range(LANES + half, 2 * LANES)],
    )
    both = vec.maximum(builder, *(vec.shuffle(builder, high, minus_minimum, lanes) for lanes in (firsts, seconds)))
    for distance in (4, 2, 1):
        lanes = [lane ^ distance for lane in range(LANES)]
        both = vec.maximum(builder, both, vec.shuffle(builder, both, both, lanes))
    return builder.extract_element(both, INT32(0)), builder.extract_element(both, INT32(half))


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _are_finite(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Whether all numbers are finite, by their bits: comparisons of NaN are not reliable in compiled code."""
    sizes = [builder.and_(builder.bitcast(each, INTS), vec.ints(INFINITE)) for each in vectors]
    are = [builder.icmp_unsigned("<", size, vec.ints(INFINITE)) for size in sizes]
    every = ir.IntType(LANES)
    return builder.icmp_unsigned("==", builder.bitcast(reduced(builder, are, ir.IRBuilder.and_), every), every(-1))


def _order_of_quads(bits: int) -> list[int]:
    """The columns of a chunk in the order of their codes: four bytes of a word after the other."""
    of_word = 32 // bits
    return [first + column for first in range(0, CHUNK, of_word) for quad in QUADS[bits] for column in quad]


def _rows_of_chunk(width: int) -> int:
    """Number of rows of words in a chunk."""
    return CHUNK * width // 32


def _chunk_places(
    builder: ir.IRBuilder, chunk: ir.Value, group_shift: ir.Value, width: int
) -> tuple[ir.Value, ir.Value]:
    """Bytes from the start of a panel to the group of a chunk, and to the words of the chunk."""
    group = builder.lshr(chunk, group_shift)
    lines = builder.mul(chunk, INT64(_rows_of_chunk(width)))
    words = builder.mul(builder.add(builder.add(group, INT64(1)), lines), INT64(CACHE_LINE))
    first = builder.mul(builder.shl(group, group_shift), INT64(_rows_of_chunk(width)))
    return builder.mul(builder.add(group, first), INT64(CACHE_LINE)), words


def _codes_of_row(builder: ir.IRBuilder, words: ir.Value, width: int) -> list[ir.Value]:
    """The codes of a row of words, widened to 8 bits: four in each lane, a vector for each quad."""
    if width == 8:
        return [words]
    return [codes_in(builder, words, quad * width, 0x0F0F0F0F) for quad in range(len(QUADS[width]))]


@intrinsic
def sum_panel(typing_context: Any, bits: Any, panel: Any, chunks: Any, group_shift: Any, out: Any) -> Any:
    """
    Write scales, minima (float32) and sums of codes (int32) of each chunk of a panel, `[PANEL_NUMBERS, LANES]`.

    bits: of a code; panel: address; chunks: number of them in a row; group_shift: binary logarithm of the number of
    chunks that share a scale; out: address of the numbers of the first chunk; those of the next follow after the
    numbers of `GEMM_PANELS` panels.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, panel, chunks, group_shift, out = arguments
        if not has_gemm():
            return context.get_dummy_value()
        dot = quad_dot()
        assert dot is not None

        def run(width: int) -> None:
            def add_chunk(chunk: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                start, words = _chunk_places(builder, chunk, group_shift, width)
                total = vec.ints(0)
                for row in range(_rows_of_chunk(width)):
                    place = builder.add(panel, builder.add(words, INT64(row * CACHE_LINE)))
                    for codes in _codes_of_row(builder, vec.load(builder, place, INTS), width):
                        total = dot(builder, [(codes, vec.ints(0x01010101))], total)
                scale, minimum = scales_and_minima(context, builder, builder.add(panel, start))
                to = builder.add(out, builder.mul(chunk, INT64(GEMM_PANELS * PANEL_NUMBERS * CACHE_LINE)))
                for index, vector in enumerate((scale, minimum, total)):
                    vec.store(builder, vector, builder.add(to, INT64(index * CACHE_LINE)))
                return carried

            vec.loop(builder, chunks, [], add_chunk)

        for width in WEIGHT_BITS:
            with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
                run(width)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _dot_with_quad(builder: ir.IRBuilder, codes: ir.Value, address: ir.Value, offset: int, total: ir.Value) -> ir.Value:
    """`total` plus the products of four codes in each lane with a quad in memory, which then needs no register."""
    kind = ir.FunctionType(INTS, [INTS, INTS, INT64])
    instruction = f"vpdpbusd {offset}($3){{1to16}}, $2, $0"
    return builder.asm(kind, instruction, "=v,0,v,r", [total, codes, address], False)


@intrinsic
def multiply_tile(
    typing_context: Any,
    bits: Any,
    panel: Any,
    second_panel: Any,
    panel_numbers: Any,
    chunks: Any,
    group_shift: Any,
    integers: Any,
    token_numbers: Any,
    out: Any,
) -> Any:
    """
    Write the products of six tokens with the rows of two panels, without the weight's factor.

    bits: of a code; panel, second_panel: addresses; panel_numbers: address of float32 `[chunks, GEMM_PANELS,
    PANEL_NUMBERS, LANES]`; chunks: number of them in a row; group_shift: binary logarithm of the number of chunks that
    share a scale; integers: address of int8 `[chunks, GEMM_TOKENS, CHUNK]`; token_numbers: address of float32 `[chunks,
    TOKEN_NUMBERS, GEMM_TOKENS]`; out: address of float32 `[GEMM_TOKENS, GEMM_PANELS, LANES]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, panel, second_panel, panel_numbers, chunks, group_shift, *others = arguments
        integers, token_numbers, out = others
        if not has_gemm():
            return context.get_dummy_value()
        add, multiply = builder.add, builder.mul
        outputs = GEMM_TOKENS * GEMM_PANELS

        def run(width: int) -> None:
            def add_chunk(chunk: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                of_panel = add(panel_numbers, multiply(chunk, INT64(GEMM_PANELS * PANEL_NUMBERS * CACHE_LINE)))
                of_token = add(token_numbers, multiply(chunk, INT64(TOKEN_NUMBERS * GEMM_TOKENS * 4)))

                def number_of_panel(which: int, index: int, kind: ir.Type) -> ir.Value:
                    line = INT64((which * PANEL_NUMBERS + index) * CACHE_LINE)
                    return vec.load(builder, add(of_panel, line), kind)

                def number_of_token(token: int, index: int, kind: ir.Type) -> ir.Value:
                    place = INT64((index * GEMM_TOKENS + token) * 4)
                    return vec.splat(builder, vec.load(builder, add(of_token, place), kind))

                sums_of_codes = [number_of_panel(which, 2, INTS) for which in range(GEMM_PANELS)]
                dots = []
                for token in range(GEMM_TOKENS):
                    zero = number_of_token(token, 2, INT32)
                    dots += [multiply(sum_of_codes, zero) for sum_of_codes in sums_of_codes]
                _, words = _chunk_places(builder, chunk, group_shift, width)
                starts = [add(each, words) for each in (panel, second_panel)]
                quads = add(integers, multiply(chunk, INT64(GEMM_TOKENS * CHUNK)))
                quad = 0
                for row in range(_rows_of_chunk(width)):
                    loaded = [vec.load(builder, add(start, INT64(row * CACHE_LINE)), INTS) for start in starts]
                    for codes in zip(*(_codes_of_row(builder, each, width) for each in loaded), strict=True):
                        for token in range(GEMM_TOKENS):
                            place = token * CHUNK + quad * 4
                            for which, each in enumerate(codes):
                                output = token * GEMM_PANELS + which
                                dots[output] = _dot_with_quad(builder, each, quads, place, dots[output])
                        quad += 1
                results = []
                scales, minima = (
                    [number_of_panel(which, index, FLOATS) for which in range(GEMM_PANELS)] for index in range(2)
                )
                for token in range(GEMM_TOKENS):
                    step, total = (number_of_token(token, index, FLOAT) for index in range(2))
                    for which in range(GEMM_PANELS):
                        output = token * GEMM_PANELS + which
                        result = vec.multiply_add(builder, minima[which], total, totals[output])
                        stepped = builder.fmul(builder.sitofp(dots[output], FLOATS), step)
                        results.append(vec.multiply_add(builder, scales[which], stepped, result))
                return results

            for output, result in enumerate(vec.loop(builder, chunks, [vec.floats(0.0)] * outputs, add_chunk)):
                vec.store(builder, result, add(out, INT64(output * CACHE_LINE)))

        for width in WEIGHT_BITS:
            with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
                run(width)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate
