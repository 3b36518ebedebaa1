"""
The products of attention with a quantized block, for four query rows.

Scales and minima are folded into the query, or the weights, before (`folding`). The products here are of small
integers, or, the portable way, of codes turned into floats. `quantized_blocks` describes a packed block.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.pair_dots import PairDot, pair_dot
from ..vector.quad_dots import QuadDot, quad_dot
from ..vector.tiles import ROWS, wide_vectors
from ..vector.vector_ir import FLOAT, FLOATS, INT32, INT64, INTS, LANES
from .folding import MOST_BITS_OF_QUADS
from .quantized_blocks import BITS


def _quantized_product(is_wide: bool, accumulates: bool) -> Any:
    def product(
        typing_context: Any,
        bits: Any,
        is_integer: Any,
        operand: Any,
        words: Any,
        inner: Any,
        lanes: Any,
        column: Any,
        steps: Any,
        constants: Any,
        corrections: Any,
        out: Any,
        out_stride: Any,
        ahead: Any,
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            bits, is_integer, operand, words, inner, lanes, column, *results, ahead = arguments
            steps, constants, corrections, out, out_stride = results
            vectors = wide_vectors(context) if is_wide else 1
            add, multiply = builder.add, builder.mul
            outputs = [
                add(out, add(multiply(INT64(row), out_stride), multiply(add(column, INT64(vector * LANES)), INT64(4))))
                for row in range(ROWS)
                for vector in range(vectors)
            ]

            def finish(sums: list[ir.Value]) -> None:
                of_rows = [
                    [vec.splat(builder, vec.load(builder, add(start, INT64(row * 4)), FLOAT)) for row in range(ROWS)]
                    for start in (steps, constants, corrections)
                ]
                for index, (total, address) in enumerate(zip(sums, outputs, strict=True)):
                    step, constant, correction = (numbers[index // vectors] for numbers in of_rows)
                    result = vec.multiply_add(builder, total, step, constant)
                    if accumulates:
                        result = vec.multiply_add(builder, vec.load(builder, address, FLOATS), correction, result)
                    vec.store(builder, result, address)

            def run(width: int, dot: "_Dot") -> None:
                """All words of the columns, with codes of `width` bits."""
                row_bytes = multiply(inner, INT64(dot.item))
                word_bytes = INT64(32 // width * dot.item)

                def body(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                    offset = multiply(add(multiply(index, lanes), column), INT64(4))
                    start = add(words, offset)
                    loaded = [
                        vec.load(builder, add(start, INT64(vector * LANES * 4)), INTS) for vector in range(vectors)
                    ]
                    vec.prefetch(builder, add(ahead, offset), vectors * LANES * 4)
                    operands = add(operand, multiply(index, word_bytes))
                    return dot.add(width, loaded, operands, row_bytes, sums)

                count = builder.sdiv(multiply(inner, INT64(width)), INT64(32))
                finish(dot.total(vec.loop(builder, count, [dot.zero] * (ROWS * vectors), body)))

            pair, quad = pair_dot(), quad_dot()
            for width in BITS:
                dots: list[_Dot] = [_FloatDot(builder)]
                if quad and width <= MOST_BITS_OF_QUADS:
                    dots.append(_QuadDot(builder, quad, weights_are_unsigned=accumulates))
                elif pair:
                    dots.append(_PairDot(builder, pair))
                for dot in dots:
                    wanted = is_integer if dot.is_integer else builder.not_(is_integer)
                    chosen = builder.and_(wanted, builder.icmp_signed("==", bits, INT64(width)))
                    with builder.if_then(chosen):
                        run(width, dot)
            return context.get_dummy_value()

        return types.void(types.int64, types.boolean, *[types.int64] * 11), generate

    columns = "tile_columns()" if is_wide else str(LANES)
    action = "Correct `out` and add to it" if accumulates else "Write to `out`"
    product.__doc__ = f"""
    {action} the product of folded rows and {columns} lanes of codes, from `column` on.

    bits: of a code; is_integer: whether `operand` has integers, see `round_rows`; words: address of the words of a
    packed block, in rows of `lanes`; steps, constants, corrections: addresses of float32 `[ROWS]`; out: address of
    float32 rows, `out_stride` bytes apart, each `[lanes]`; ahead: address to prefetch, as many bytes as are read.
    """
    return intrinsic(product)


class _Dot(ABC):
    """One way to multiply the codes in a row of words and to sum the products."""

    is_integer: bool
    item: int  # bytes of a number of the operand
    zero: ir.Constant

    def __init__(self, builder: ir.IRBuilder):
        self._builder = builder

    @abstractmethod
    def add(
        self, width: int, loaded: list[ir.Value], operands: ir.Value, row_bytes: ir.Value, sums: list[ir.Value]
    ) -> list[ir.Value]:
        """Add the products of one word in each lane to `sums`, which has a vector for each row and loaded vector."""

    @abstractmethod
    def total(self, sums: list[ir.Value]) -> list[ir.Value]:
        """`sums` as floats."""

    def _number(self, operands: ir.Value, row_bytes: ir.Value, row: int, offset: int, kind: ir.Type) -> ir.Value:
        """The number, pair or four of numbers at `offset` in a row, in all lanes."""
        builder = self._builder
        position = builder.add(operands, builder.add(builder.mul(INT64(row), row_bytes), INT64(offset)))
        return vec.splat(builder, vec.load(builder, position, kind))

    def _with_operands(
        self,
        operands: ir.Value,
        row_bytes: ir.Value,
        offset: int,
        kind: ir.Type,
        codes: list[ir.Value],
        sums: list[ir.Value],
        multiply_add: Callable[..., ir.Value],
    ) -> list[ir.Value]:
        """`sums` plus `codes` times the number, or the pair, that each row has at `offset`."""
        builder, results = self._builder, []
        for row in range(ROWS):
            number = self._number(operands, row_bytes, row, offset, kind)
            row_sums = sums[row * len(codes) : (row + 1) * len(codes)]
            results += [multiply_add(builder, code, number, total) for code, total in zip(codes, row_sums, strict=True)]
        return results


class _FloatDot(_Dot):
    """The portable way: codes become floats."""

    is_integer, item, zero = False, 4, vec.floats(0.0)

    def add(
        self, width: int, loaded: list[ir.Value], operands: ir.Value, row_bytes: ir.Value, sums: list[ir.Value]
    ) -> list[ir.Value]:
        builder = self._builder
        for index in range(32 // width):
            shift = index // 2 * width + index % 2 * 16
            codes = [codes_in(builder, words, shift, 2**width - 1, shift + width == 32) for words in loaded]
            numbers = [builder.sitofp(code, FLOATS) for code in codes]
            sums = self._with_operands(operands, row_bytes, 4 * index, FLOAT, numbers, sums, vec.multiply_add)
        return sums

    def total(self, sums: list[ir.Value]) -> list[ir.Value]:
        return sums


class _PairDot(_Dot):
    """Sums of two products of 16-bit integers, see `pair_dots`."""

    is_integer, item, zero = True, 2, vec.ints(0)

    def __init__(self, builder: ir.IRBuilder, multiply_add: PairDot):
        super().__init__(builder)
        self._multiply_add = multiply_add

    def add(
        self, width: int, loaded: list[ir.Value], operands: ir.Value, row_bytes: ir.Value, sums: list[ir.Value]
    ) -> list[ir.Value]:
        builder, mask = self._builder, (2**width - 1) * 0x10001
        for index in range(16 // width):
            codes = [codes_in(builder, words, index * width, mask, False) for words in loaded]
            sums = self._with_operands(operands, row_bytes, 4 * index, INT32, codes, sums, self._multiply_add)
        return sums

    def total(self, sums: list[ir.Value]) -> list[ir.Value]:
        return [self._builder.sitofp(each, FLOATS) for each in sums]


class _QuadDot(_Dot):
    """Sums of four products of 8-bit integers, see `quad_dots`."""

    is_integer, item, zero = True, 1, vec.ints(0)

    def __init__(self, builder: ir.IRBuilder, multiply_add: QuadDot, weights_are_unsigned: bool):
        super().__init__(builder)
        self._multiply_add, self._weights_are_unsigned = multiply_add, weights_are_unsigned

    def add(
        self, width: int, loaded: list[ir.Value], operands: ir.Value, row_bytes: ir.Value, sums: list[ir.Value]
    ) -> list[ir.Value]:
        builder, mask = self._builder, (2**width - 1) * 0x1010101
        indices = range(8 // width)
        codes = [[codes_in(builder, words, index * width, mask) for words in loaded] for index in indices]
        results = []
        for row in range(ROWS):
            numbers = [self._number(operands, row_bytes, row, 4 * index, INT32) for index in indices]
            for vector in range(len(loaded)):
                # Codes are below 128, so they may be the signed or the unsigned factor, and sums fit in 16 bits.
                pairs = [(of_word[vector], number) for of_word, number in zip(codes, numbers, strict=True)]
                pairs = [pair[::-1] for pair in pairs] if self._weights_are_unsigned else pairs
                results.append(self._multiply_add(builder, pairs, sums[row * len(loaded) + vector]))
        return results

    def total(self, sums: list[ir.Value]) -> list[ir.Value]:
        return [self._builder.sitofp(each, FLOATS) for each in sums]


def codes_in(builder: ir.IRBuilder, words: ir.Value, shift: int, mask: int, is_last: bool = False) -> ir.Value:
    """The codes that a shift and a mask take out of each word; the last codes of a word need no mask."""
    shifted = builder.lshr(words, vec.ints(shift)) if shift else words
    return shifted if is_last else builder.and_(shifted, vec.ints(mask))


score_quantized_tile = _quantized_product(is_wide=True, accumulates=False)
score_narrow_quantized_tile = _quantized_product(is_wide=False, accumulates=False)
weigh_quantized_tile = _quantized_product(is_wide=True, accumulates=True)
weigh_narrow_quantized_tile = _quantized_product(is_wide=False, accumulates=True)
