"""
Products of quantized weights with many tokens, by the processor's products of 8-bit integers.

Tokens are rounded in strips of 32 columns to `step * (q + zero)`, a block of them at a time, which stays in the
second-level cache. Then each thread takes some pairs of panels at a time and multiplies them with a block, six tokens
and two panels together, or as many of their rows at a time as there are registers for.

A weight is `minimum + scale * code`. So a strip adds `scale * step * sum(q * code) + scale * sum(code) * step * zero +
minimum * total`. The first sum is of integers, four products in an instruction; `total` is the sum of the rounded
numbers. `forms.panels` describes a panel and the order of its codes.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..forms.panels import STRIP, for_width, quads_of_codes, scales_and_minima, strip_lines
from ..vector import vector_ir as vec
from ..vector.compiled import Needed, jit, jit_function, taking_numbers
from ..vector.dots import quad_dot, quad_sums
from ..vector.intrinsics import call_at
from ..vector.numbers_at import Numbers, address_of, keep
from ..vector.parallel import split_work, team_of_kernels, threads_of
from ..vector.processor import has_amx, has_products_of_bytes, uses_integer_kernels
from ..vector.vector_ir import CACHE_LINE, FLOAT, FLOATS, INT32, INT64, INTS, LANES
from .operands import round_strip, whole_group
from .products import Products, Weights, factor_at, load_bias, part_of, store_outputs

# Panels and tokens of a tile: as many sums, of integers and of floats, as AVX-512 has registers for.
_PANELS, _TOKENS = 2, 6
# Numbers of a strip: of each panel scales, minima and scaled sums of codes; of each token its step, total and zero.
_PANEL_NUMBERS, _TOKEN_NUMBERS = 3, 3
# Bytes of the integers, and of all numbers, of a tile of tokens in a strip.
_INTEGER_BYTES = _TOKENS * STRIP
_TILE_BYTES = _INTEGER_BYTES + _TOKENS * _TOKEN_NUMBERS * 4
# Bytes of the integers of a block of tokens, and number of blocks that are rounded at a time.
_BLOCK_BYTES, _BLOCKS = 2**19, 3
# The most pairs of panels that a thread takes at a time, and the parts that a thread has at least.
_PART_PAIRS, _PARTS_OF_THREAD = 4, 4


class _Tiles(NamedTuple):
    """One call of `_round_tile` and `_multiply_block`. Arrays are addresses."""

    weights: int  # address of `Weights`
    matrix: int
    strips: int  # in a row
    group_shift: int  # binary logarithm of the strips that share a scale
    tokens: Numbers  # [num_tokens, columns]
    num_tokens: int
    bias: Numbers  # [rows]; at 0 for none
    out: Numbers  # [num_tokens, rows]
    integers: int  # int8 [tiles, strips, _TOKENS, STRIP]
    numbers: int  # float32 [tiles, strips, _TOKEN_NUMBERS, _TOKENS]
    tiles: int
    block_tiles: int
    parts: int  # of each block


def uses_gemm(bits: int, is_bfloat16: bool) -> bool:
    """Whether this kernel multiplies many tokens with codes of `bits`. With AMX torch multiplies bfloat16 faster."""
    return uses_integer_kernels() and has_products_of_bytes(bits) and not (is_bfloat16 and has_amx())


def multiply_many(
    weights: Products, index: int, tokens: int, num_tokens: int, is_bfloat16: bool, bias: int, out: int
) -> None:
    """
    Write `tokens @ weight.T + bias`, with tokens rounded to 8 bits between the least and largest of 32 columns.

    Args:
        weights: quantized.
        index: of the weight.
        tokens: address of contiguous `[num_tokens, columns]`, float32 or bfloat16.
        num_tokens: at least 1.
        is_bfloat16: whether tokens, bias and `out` are bfloat16, not float32.
        bias: address of `[rows]`; 0 for none.
        out: address of contiguous `[num_tokens, rows]`, written.
    """
    _multiply_many(team_of_kernels().address, weights.address, index, tokens, num_tokens, is_bfloat16, bias, out)


@jit
def _multiply_many(team, weights, index, tokens, num_tokens, is_bfloat16, bias, out):
    given = call_at(weights, Weights)
    strips = given.groups * given.group // STRIP
    group_shift = 0
    while STRIP << group_shift < given.group:
        group_shift += 1
    block_tiles = max(1, _BLOCK_BYTES // (strips * _INTEGER_BYTES))
    tiles = min(_BLOCKS * block_tiles, (num_tokens + _TOKENS - 1) // _TOKENS)
    scratch = np.empty(tiles * strips * _TILE_BYTES, np.uint8)
    integers = np.int64(scratch.ctypes.data)
    pairs = ((given.rows + LANES - 1) // LANES + _PANELS - 1) // _PANELS
    for first in range(0, num_tokens, tiles * _TOKENS):
        count = min(num_tokens - first, tiles * _TOKENS)
        call = _Tiles(
            weights=weights,
            matrix=index,
            strips=strips,
            group_shift=group_shift,
            tokens=Numbers(address_of(Numbers(tokens, is_bfloat16), first * given.columns), is_bfloat16),
            num_tokens=count,
            bias=Numbers(bias, is_bfloat16),
            out=Numbers(address_of(Numbers(out, is_bfloat16), first * given.rows), is_bfloat16),
            integers=integers,
            numbers=integers + tiles * strips * _INTEGER_BYTES,
            tiles=(count + _TOKENS - 1) // _TOKENS,
            block_tiles=block_tiles,
            parts=max((pairs + _PART_PAIRS - 1) // _PART_PAIRS, min(pairs, _PARTS_OF_THREAD * threads_of(team))),
        )
        split_work(team, call.tiles, _round_tile, call)
        split_work(team, (call.tiles + block_tiles - 1) // block_tiles * call.parts, _multiply_block, call)
    keep(scratch)


def gemm_kernels() -> list[Needed]:
    """The kernel of products with many tokens."""
    return [(_multiply_many, taking_numbers(_multiply_many))]


@jit_function
def _round_tile(tile, call):
    """Round the tokens of a tile; the last token fills up the last tile."""
    weights = call_at(call.weights, Weights)
    scratch = np.empty(STRIP, np.float32)
    for index in range(_TOKENS):
        token = min(tile * _TOKENS + index, call.num_tokens - 1)
        for strip in range(call.strips):
            # Zeros meet the codes that pad a strip, and the strips that pad a group.
            first = strip * STRIP
            numbers = whole_group(call.tokens, token * weights.columns + first, weights.columns - first, scratch)
            place = tile * call.strips + strip
            round_strip(
                weights.bits,
                numbers.address,
                numbers.is_bfloat16,
                call.integers + place * _INTEGER_BYTES + index * STRIP,
                call.numbers + (place * _TOKEN_NUMBERS * _TOKENS + index) * 4,
                _TOKENS * 4,
            )


@jit_function
def _multiply_block(part, call):
    """Write the outputs of some pairs of panels for the tokens of a block."""
    weights = call_at(call.weights, Weights)
    numbers = np.empty((call.strips, _PANELS, _PANEL_NUMBERS, LANES), np.float32)
    outputs = np.empty((_TOKENS, _PANELS, LANES), np.float32)
    biases = np.zeros((_PANELS, LANES), np.float32)
    address, factor = weights.address + call.matrix * weights.matrix_bytes, factor_at(weights, call.matrix)
    panels = (weights.rows + LANES - 1) // LANES
    first_pair, last_pair = part_of(part % call.parts, call.parts, (panels + _PANELS - 1) // _PANELS)
    first_tile = part // call.parts * call.block_tiles
    for pair in range(first_pair, last_pair):
        first = pair * _PANELS
        # If the number of panels is odd, the last pair is the last panel twice.
        both = address + first * weights.panel_bytes, address + min(first + 1, panels - 1) * weights.panel_bytes
        for which in range(_PANELS):
            load_bias(call.bias, 0, (first + which) * LANES, weights.rows, biases[which])
            at = numbers[0, which].ctypes.data
            _sum_panel(weights.bits, both[which], call.strips, call.group_shift, at)
        for tile in range(first_tile, min(call.tiles, first_tile + call.block_tiles)):
            _multiply_tile(
                weights.bits,
                both[0],
                both[1],
                numbers.ctypes.data,
                call.strips,
                call.group_shift,
                call.integers + tile * call.strips * _INTEGER_BYTES,
                call.numbers + tile * call.strips * _TOKEN_NUMBERS * _TOKENS * 4,
                outputs.ctypes.data,
            )
            for index in range(min(_TOKENS, call.num_tokens - tile * _TOKENS)):
                token = tile * _TOKENS + index
                for which in range(_PANELS):
                    output = outputs.ctypes.data + (index * _PANELS + which) * CACHE_LINE
                    bias, row = biases.ctypes.data + which * CACHE_LINE, (first + which) * LANES
                    if row < weights.rows:
                        store_outputs(output, factor, bias, call.out, token * weights.rows + row, weights.rows - row)
    keep(numbers)
    keep(outputs)
    keep(biases)


def _strip_places(
    builder: ir.IRBuilder, strip: ir.Value, group_shift: ir.Value, width: int
) -> tuple[ir.Value, ir.Value]:
    """Bytes from the start of a panel to the group of a strip, and to the words of the strip."""
    group = builder.lshr(strip, group_shift)
    lines = builder.mul(strip, INT64(strip_lines(width)))
    words = builder.mul(builder.add(builder.add(group, INT64(1)), lines), INT64(CACHE_LINE))
    first = builder.mul(builder.shl(group, group_shift), INT64(strip_lines(width)))
    return builder.mul(builder.add(group, first), INT64(CACHE_LINE)), words


@intrinsic
def _sum_panel(typing_context: Any, bits: Any, panel: Any, strips: Any, group_shift: Any, out: Any) -> Any:
    """
    Write scales, minima and scaled sums of codes of each strip of a panel, float32 `[_PANEL_NUMBERS, LANES]`.

    bits: of a code; panel: address; strips: number of them in a row; group_shift: binary logarithm of the number of
    strips that share a scale; out: address of the numbers of the first strip; those of the next follow after the
    numbers of `_PANELS` panels.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, panel, strips, group_shift, out = arguments
        dot = quad_dot()

        def run(width: int) -> None:
            if dot is None or not has_products_of_bytes(width):
                return

            def add_strip(strip: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                start, words = _strip_places(builder, strip, group_shift, width)
                total = vec.ints(0)
                for line in range(strip_lines(width)):
                    place = builder.add(panel, builder.add(words, INT64(line * CACHE_LINE)))
                    for codes in quads_of_codes(builder, vec.load(builder, place, INTS), width):
                        total = dot(builder, [(codes, vec.ints(0x01010101))], total)
                scale, minimum = scales_and_minima(context, builder, builder.add(panel, start))
                to = builder.add(out, builder.mul(strip, INT64(_PANELS * _PANEL_NUMBERS * CACHE_LINE)))
                scaled = builder.fmul(builder.sitofp(total, FLOATS), scale)
                for index, vector in enumerate((scale, minimum, scaled)):
                    vec.store(builder, vector, builder.add(to, INT64(index * CACHE_LINE)))
                return carried

            vec.loop(builder, strips, [], add_strip)

        for_width(builder, bits, run)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def _multiply_tile(
    typing_context: Any,
    bits: Any,
    panel: Any,
    second_panel: Any,
    panel_numbers: Any,
    strips: Any,
    group_shift: Any,
    integers: Any,
    token_numbers: Any,
    out: Any,
) -> Any:
    """
    Write the products of six tokens with the rows of two panels, without the weight's factor.

    bits: of a code; panel, second_panel: addresses; panel_numbers: address of float32 `[strips, _PANELS,
    _PANEL_NUMBERS, LANES]`; strips: number of them in a row; group_shift: binary logarithm of the number of strips that
    share a scale; integers: address of int8 `[strips, _TOKENS, STRIP]`; token_numbers: address of float32 `[strips,
    _TOKEN_NUMBERS, _TOKENS]`; out: address of float32 `[_TOKENS, _PANELS, LANES]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, panel, second_panel, panel_numbers, strips, group_shift, *others = arguments
        integers, token_numbers, out = others
        sums = quad_sums()
        add, multiply = builder.add, builder.mul

        def run(width: int) -> None:
            if sums is None or not has_products_of_bytes(width):
                return
            floats, words = (ir.VectorType(kind, sums.lanes) for kind in (FLOAT, INT32))
            vectors, parts = range(sums.vectors), LANES // sums.lanes

            def run_tile(tile: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                """A part of the rows, whose sums stay in registers."""
                first = multiply(tile, INT64(sums.vectors))
                which, part = builder.sdiv(first, INT64(parts)), builder.srem(first, INT64(parts))
                lane = multiply(part, INT64(sums.lanes * 4))
                own_panel = builder.select(builder.icmp_signed(">", which, INT64(0)), second_panel, panel)
                panels_of_tile = [add(each, lane) for each in (own_panel, second_panel)][: sums.vectors]
                start_of_numbers = add(panel_numbers, add(multiply(which, INT64(_PANEL_NUMBERS * CACHE_LINE)), lane))

                def add_strip(strip: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                    of_panel = add(start_of_numbers, multiply(strip, INT64(_PANELS * _PANEL_NUMBERS * CACHE_LINE)))
                    of_token = add(token_numbers, multiply(strip, INT64(_TOKEN_NUMBERS * _TOKENS * 4)))

                    def number_of_panel(vector: int, index: int) -> ir.Value:
                        line = INT64((vector * _PANEL_NUMBERS + index) * CACHE_LINE)
                        return vec.load(builder, add(of_panel, line), floats)

                    def number_of_token(token: int, index: int) -> ir.Value:
                        place = INT64((index * _TOKENS + token) * 4)
                        return vec.splat(builder, vec.load(builder, add(of_token, place), FLOAT), sums.lanes)

                    _, strip_words = _strip_places(builder, strip, group_shift, width)
                    starts = [add(each, strip_words) for each in panels_of_tile]
                    quads = add(integers, multiply(strip, INT64(_TOKENS * STRIP)))
                    dots = [sums.zero for _ in range(_TOKENS) for _ in vectors]
                    quad = 0
                    for line in range(strip_lines(width)):
                        # One row at a time, as there are few registers left.
                        loaded = [vec.load(builder, add(start, INT64(line * CACHE_LINE)), words) for start in starts]
                        for codes in zip(*(quads_of_codes(builder, each, width) for each in loaded), strict=True):
                            for token in range(_TOKENS):
                                place = token * STRIP + quad * 4
                                for vector, each in enumerate(codes):
                                    output = token * sums.vectors + vector
                                    dots[output] = sums.add(builder, each, quads, place, dots[output])
                            quad += 1
                    results = []
                    scales, minima, sums_of_codes = (
                        [number_of_panel(vector, index) for vector in vectors] for index in range(_PANEL_NUMBERS)
                    )
                    for token in range(_TOKENS):
                        step, total, zero = (number_of_token(token, index) for index in range(_TOKEN_NUMBERS))
                        for vector in vectors:
                            output = token * sums.vectors + vector
                            result = vec.multiply_add(builder, minima[vector], total, totals[output])
                            result = vec.multiply_add(builder, sums_of_codes[vector], zero, result)
                            dot = builder.sitofp(sums.widened(builder, dots[output]), floats)
                            stepped = builder.fmul(dot, step)
                            results.append(vec.multiply_add(builder, scales[vector], stepped, result))
                    return results

                zeros = [ir.Constant(floats, [0.0] * sums.lanes)] * (sums.vectors * _TOKENS)
                start_of_outputs = add(out, add(multiply(which, INT64(CACHE_LINE)), lane))
                for output, result in enumerate(vec.loop(builder, strips, zeros, add_strip)):
                    token, vector = divmod(output, sums.vectors)
                    vec.store(builder, result, add(start_of_outputs, INT64((token * _PANELS + vector) * CACHE_LINE)))
                return carried

            vec.loop(builder, INT64(_PANELS * parts // sums.vectors), [], run_tile)

        for_width(builder, bits, run)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate
