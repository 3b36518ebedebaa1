"""
The products of attention with a quantized block, for four query rows.

Scales and minima are folded into the query, or the weights, before (`attention.codes`). The products here are of small
integers, or, the portable way, of codes turned into floats.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .dots import pair_dot, quad_dot
from .processor import has_pair_dot
from .tiles import ROWS, Columns, Results, Rows, Source, multiply
from .vector_ir import BLOCK, FLOAT, FLOATS, INT32, INT64

# Bits of a code.
BITS = (8, 4, 2)
# Codes of at most these bits are multiplied four at a time, with operands of 8 bits.
MOST_BITS_OF_QUADS = 4


class _FloatCodes(Source):
    """The portable way: codes become floats."""

    def __init__(self, context: Any, builder: ir.IRBuilder, bits: int):
        super().__init__(context, builder)
        self._bits, self.step = bits, 32 // bits * 4

    def add(self, columns: list[ir.Value], operand: Rows, sums: list[ir.Value]) -> list[ir.Value]:
        builder, bits = self.builder, self._bits
        for index in range(32 // bits):
            shift = index // 2 * bits + index % 2 * 16
            codes = [codes_in(builder, words, shift, 2**bits - 1, shift + bits == 32) for words in columns]
            numbers = [builder.sitofp(code, FLOATS) for code in codes]
            sums = self._with_each_row(numbers, operand, 4 * index, FLOAT, sums, vec.multiply_add)
        return sums


class _IntegerCodes(Source):
    """
    Sums of products of integers, see `dots`, in each lane two of 16 bits or four of 8 bits.

    Of those of 8 bits, the numbers of the operand or else the codes are unsigned.
    """

    zero = vec.ints(0)

    def __init__(self, context: Any, builder: ir.IRBuilder, bits: int, is_operand_unsigned: bool):
        super().__init__(context, builder)
        self._bits, self._is_operand_unsigned = bits, is_operand_unsigned
        self._number_bits = 8 if bits <= MOST_BITS_OF_QUADS else 16
        self.step = 32 // bits * self._number_bits // 8

    def add(self, columns: list[ir.Value], operand: Rows, sums: list[ir.Value]) -> list[ir.Value]:
        builder, bits, indices = self.builder, self._bits, range(self._number_bits // self._bits)
        mask = sum(2**bits - 1 << first for first in range(0, 32, self._number_bits))
        codes = [[codes_in(builder, words, index * bits, mask) for words in columns] for index in indices]
        results = []
        # Row by row, so that few products are there at a time: AVX2 has sixteen registers.
        for row in range(ROWS):
            numbers = [operand.number(builder, row, 4 * index, INT32) for index in indices]
            for column in range(len(columns)):
                pairs = [(of_word[column], number) for of_word, number in zip(codes, numbers, strict=True)]
                results.append(self._added(pairs, sums[row * len(columns) + column]))
        return results

    def _added(self, pairs: list[tuple[ir.Value, ir.Value]], total: ir.Value) -> ir.Value:
        """`total` plus the products of codes and numbers."""
        if self._number_bits == 16:
            dot = pair_dot()
            assert dot is not None
            for codes, numbers in pairs:
                total = dot(self.builder, codes, numbers, total)
            return total
        quads = quad_dot()
        assert quads is not None
        # Codes are below 128, so they may be the signed or the unsigned factor, and sums fit in 16 bits.
        return quads(self.builder, [pair[::-1] for pair in pairs] if self._is_operand_unsigned else pairs, total)

    def in_order(self, sums: list[ir.Value]) -> list[ir.Value]:
        return [self.builder.sitofp(each, FLOATS) for each in sums]


def codes_in(builder: ir.IRBuilder, words: ir.Value, shift: int, mask: int, is_last: bool = False) -> ir.Value:
    """The codes that a shift and a mask take out of each word; the last codes of a word need no mask."""
    lanes = words.type.count
    shifted = builder.lshr(words, vec.ints(shift, lanes)) if shift else words
    return shifted if is_last else builder.and_(shifted, vec.ints(mask, lanes))


def _multiply_codes(
    context: Any,
    builder: ir.IRBuilder,
    bits: ir.Value,
    is_integer: ir.Value,
    operand: ir.Value,
    columns: Columns,
    results: Results,
) -> None:
    """Multiply an operand with codes; `columns.rows` is the length of the operand's rows."""
    is_operand_unsigned = results.corrections is not None  # weights, not a query
    for width in BITS:
        sources: list[tuple[Source, ir.Value]] = [(_FloatCodes(context, builder, width), builder.not_(is_integer))]
        if has_pair_dot():
            sources.append((_IntegerCodes(context, builder, width, is_operand_unsigned), is_integer))
        for source, is_wanted in sources:
            with builder.if_then(builder.and_(is_wanted, builder.icmp_signed("==", bits, INT64(width)))):
                rows = Rows(operand, builder.mul(columns.rows, INT64(source.step * width // 32)))
                words = builder.sdiv(builder.mul(columns.rows, INT64(width)), INT64(32))
                multiply(source, rows, columns._replace(rows=words), results)


@intrinsic
def score_codes(
    typing_context: Any,
    bits: Any,
    is_integer: Any,
    operand: Any,
    words: Any,
    inner: Any,
    first: Any,
    end: Any,
    steps: Any,
    constants: Any,
    scores: Any,
    ahead: Any,
) -> Any:
    """
    Write to the columns from `first` to `end` of `scores` the product of a folded query with the codes of keys.

    bits: of a code; is_integer: whether `operand` has integers, see `attention.codes`; operand: address of rows of
    `inner` numbers; words: address of the words of packed keys, in rows of `BLOCK`; steps, constants: addresses of
    float32 `[ROWS]`; scores: address of float32 `[ROWS, BLOCK]`; ahead: address to prefetch, as many bytes as are read.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, is_integer, operand, words, inner, first, end, steps, constants, scores, ahead = arguments
        row_bytes = INT64(BLOCK * 4)
        columns = Columns(words, row_bytes, inner, (first, end), ahead)
        results = Results(Rows(scores, row_bytes), steps=steps, constants=constants)
        _multiply_codes(context, builder, bits, is_integer, operand, columns, results)
        return context.get_dummy_value()

    return types.void(types.int64, types.boolean, *[types.int64] * 9), generate


@intrinsic
def weigh_codes(
    typing_context: Any,
    bits: Any,
    is_integer: Any,
    operand: Any,
    words: Any,
    inner: Any,
    lanes: Any,
    first: Any,
    end: Any,
    steps: Any,
    constants: Any,
    corrections: Any,
    out: Any,
    ahead: Any,
) -> Any:
    """
    Correct the columns from `first` to `end` of `out` and add the product of folded weights with the codes of values.

    words: address of the words of packed values, in rows of `lanes`; corrections: address of float32 `[ROWS]`; out:
    address of float32 `[ROWS, lanes]`; the others as in `score_codes`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, is_integer, operand, words, inner, lanes, first, end, *numbers, out, ahead = arguments
        steps, constants, corrections = numbers
        row_bytes = builder.mul(lanes, INT64(4))
        columns = Columns(words, row_bytes, inner, (first, end), ahead)
        results = Results(Rows(out, row_bytes), corrections, steps, constants)
        _multiply_codes(context, builder, bits, is_integer, operand, columns, results)
        return context.get_dummy_value()

    return types.void(types.int64, types.boolean, *[types.int64] * 11), generate
