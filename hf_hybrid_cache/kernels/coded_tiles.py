"""
The products of attention with a coded block, for four query rows.

Scales and lows are folded into the query, or the weights; what is left is a product with small integers. Where the
processor has integer dot products, the folded numbers are rounded, relative to the largest of their row: to 16 bits
for codes of 8 bits, which are multiplied in pairs (`pair_dots`), and to 8 for fewer, four at a time (`quad_dots`). The
portable way turns codes into floats.

`coded_blocks` says what a record looks like. The folded numbers of a chunk of sixteen are in the order in which codes
come out of the words: 0, 8, 1, 9, ..., or that of `_quad_order`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .coded_blocks import BITS, CHUNK
from .pair_dots import PairDot, pair_dot
from .quad_dots import QuadDot, quad_dot
from .tiles import ROWS, load_vectors, wide_vectors
from .vector_ir import FLOAT, FLOATS, INT8, INT16, INT32, INT64, INTS, LANES

_PAIR_ORDER = [lane // 2 + lane % 2 * 8 for lane in range(CHUNK)]
# Codes of so many bits or fewer are multiplied four at a time, with folded numbers of 8 bits.
MOST_BITS_OF_QUADS = 4


def _quad_order(width: int) -> list[int]:
    """Of the folded numbers of a chunk: that in which codes come out of the words four at a time, a byte each."""
    places = [
        (word, shift, byte) for word in range(CHUNK * width // 32) for shift in range(8 // width) for byte in range(4)
    ]
    return [
        word * (16 // width) + shift + byte % 2 * (8 // width) + byte // 2 * (CHUNK // 2)
        for word, shift, byte in places
    ]


@intrinsic
def prefetch_numbers(typing_context: Any, address: Any, num_bytes: Any) -> Any:
    """Ask for the cache lines of the scales and lows of a record that will be read next."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        address, num_bytes = arguments

        def body(line: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            vec.prefetch(builder, builder.add(address, builder.mul(line, INT64(vec.CACHE_LINE))), 1)
            return []

        vec.loop(builder, builder.sdiv(num_bytes, INT64(vec.CACHE_LINE)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fold_tile(
    typing_context: Any,
    rows: Any,
    stride: Any,
    scales: Any,
    lows: Any,
    inner: Any,
    bits: Any,
    limit: Any,
    scratch: Any,
    operand: Any,
    steps: Any,
    constants: Any,
) -> Any:
    """
    Fold scales and lows of one group into four rows.

    rows: address of float32 rows, `stride` bytes apart, each `[inner]`; scales, lows: addresses of bfloat16 `[inner]`;
    bits: of a code; limit: the largest integer to round to, or 0 for the portable way; scratch: address of float32
    `[ROWS, inner]`; operand: address of what is written, `[ROWS, inner]`: float32, or with a limit the integers that
    are multiplied with codes of so many bits; steps, constants: addresses of float32 `[ROWS]`: a row is
    `steps * operand @ codes + constants`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        rows, stride, scales, lows, inner, bits, limit, scratch, operand, steps, constants = arguments
        add, multiply = builder.add, builder.mul
        chunks = builder.sdiv(inner, INT64(CHUNK))

        def place(start: ir.Value, row: int, chunk: ir.Value, item: int, row_bytes: ir.Value | None = None) -> ir.Value:
            row_bytes = multiply(inner, INT64(item)) if row_bytes is None else row_bytes
            return add(start, add(multiply(INT64(row), row_bytes), multiply(chunk, INT64(CHUNK * item))))

        def fold(order: list[int], target: ir.Value, middle: float) -> tuple[list[ir.Value], list[ir.Value]]:
            """Write folded numbers; returns what is largest in each row, and its constant, by lanes."""

            def fold_chunk(chunk: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                offset = multiply(chunk, INT64(CHUNK * 2))
                scale, low = (
                    load_vectors(context, builder, types.uint16, add(start, offset), 1)[0] for start in (scales, lows)
                )
                highest, sums = [], []
                for row in range(ROWS):
                    number = vec.load(builder, place(rows, row, chunk, 4, stride), FLOATS)
                    folded = builder.fmul(number, scale)
                    vec.store(builder, vec.shuffle(builder, folded, folded, order), place(target, row, chunk, 4))
                    highest.append(vec.maximum(builder, vec.absolute(builder, folded), carried[row]))
                    total = vec.multiply_add(builder, number, low, carried[ROWS + row])
                    sums.append(vec.multiply_add(builder, folded, vec.floats(middle), total) if middle else total)
                return highest + sums

            results = vec.loop(builder, chunks, [vec.floats(0.0)] * (2 * ROWS), fold_chunk)
            return results[:ROWS], results[ROWS:]

        def fold_to_integers(order: list[int], kind: ir.Type, middle: float) -> None:
            """
            Rounded relative to the largest of a row.

            What rounding leaves out is multiplied with the middle code: so all that a row adds up to is kept.
            """
            largest, sums = fold(order, scratch, middle)
            highest = vec.fold(builder, largest, vec.maximum)
            most = vec.splat(builder, builder.sitofp(limit, FLOAT))
            nothing = builder.fcmp_ordered("<", highest, vec.floats(vec.NEGLIGIBLE))
            factors = builder.select(nothing, vec.floats(0.0), builder.fdiv(most, highest))
            step = builder.fmul(highest, vec.splat(builder, builder.fdiv(FLOAT(1.0), builder.sitofp(limit, FLOAT))))
            vec.store_four(builder, step, steps)

            def round_chunk(chunk: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                results = []
                for row in range(ROWS):
                    number = vec.load(builder, place(scratch, row, chunk, 4), FLOATS)
                    factor = vec.splat_fourth(builder, factors, row)
                    nearest = vec.nearest_integers(builder, number, factor)
                    integers = builder.trunc(nearest, ir.VectorType(kind, LANES))
                    vec.store(builder, integers, place(operand, row, chunk, kind.width // 8))
                    if middle:
                        results.append(add(totals[row], nearest))
                return results

            totals = vec.loop(builder, chunks, [vec.ints(0)] * (ROWS if middle else 0), round_chunk)
            constant = vec.fold(builder, sums, vec.add)
            if middle:
                total = vec.fold(builder, [builder.sitofp(each, FLOATS) for each in totals], vec.add)
                constant = vec.multiply_add(builder, builder.fmul(step, vec.floats(-middle)), total, constant)
            vec.store_four(builder, constant, constants)

        is_integer = builder.icmp_signed(">", limit, INT64(0))
        with builder.if_then(builder.not_(is_integer)):
            _, sums = fold(_PAIR_ORDER, operand, 0.0)
            vec.store_four(builder, vec.fold(builder, sums, vec.add), constants)
            vec.store_four(builder, vec.floats(1.0), steps)
        for width in BITS:
            with builder.if_then(builder.and_(is_integer, builder.icmp_signed("==", bits, INT64(width)))):
                if width <= MOST_BITS_OF_QUADS:
                    fold_to_integers(_quad_order(width), INT8, (2**width - 1) / 2)
                else:
                    fold_to_integers(_PAIR_ORDER, INT16, 0.0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


def _coded_product(is_wide: bool, accumulates: bool) -> Any:
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
                for index, (total, address) in enumerate(zip(sums, outputs, strict=True)):
                    offset = INT64(index // vectors * 4)
                    step, constant, correction = (
                        vec.splat(builder, vec.load(builder, add(start, offset), FLOAT))
                        for start in (steps, constants, corrections)
                    )
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

            pair, quad = pair_dot(context), quad_dot(context)
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

    bits: of a code; is_integer: whether `operand` is, see `fold_tile`; words: address of a record's words, rows of
    `lanes`; steps, constants, corrections: addresses of float32 `[ROWS]`; out: address of float32 rows, `out_stride`
    bytes apart, `[lanes]`; ahead: address of what is read next, prefetched as far as words are read here.
    """
    return intrinsic(product)


class _Dot(ABC):
    """How a row of words is multiplied and added up."""

    is_integer: bool
    item: int  # bytes of a folded number
    zero: ir.Constant

    def __init__(self, builder: ir.IRBuilder):
        self._builder = builder

    @abstractmethod
    def add(
        self, width: int, loaded: list[ir.Value], operands: ir.Value, row_bytes: ir.Value, sums: list[ir.Value]
    ) -> list[ir.Value]:
        """`sums`, for each row and vector, plus the products of one word of each lane."""

    @abstractmethod
    def total(self, sums: list[ir.Value]) -> list[ir.Value]:
        """`sums` as floats."""

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
            position = builder.add(operands, builder.add(builder.mul(INT64(row), row_bytes), INT64(offset)))
            number = vec.splat(builder, vec.load(builder, position, kind))
            row_sums = sums[row * len(codes) : (row + 1) * len(codes)]
            results += [multiply_add(builder, code, number, total) for code, total in zip(codes, row_sums, strict=True)]
        return results


class _FloatDot(_Dot):
    """Codes become floats: the portable way."""

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
    """Two products of 16-bit numbers are added up in 32 bits, see `pair_dots`."""

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
    """Four products of 8-bit numbers are added up in 32 bits, see `quad_dots`."""

    is_integer, item, zero = True, 1, vec.ints(0)

    def __init__(self, builder: ir.IRBuilder, multiply_add: QuadDot, weights_are_unsigned: bool):
        super().__init__(builder)
        self._multiply_add, self._weights_are_unsigned = multiply_add, weights_are_unsigned

    def add(
        self, width: int, loaded: list[ir.Value], operands: ir.Value, row_bytes: ir.Value, sums: list[ir.Value]
    ) -> list[ir.Value]:
        builder, mask = self._builder, (2**width - 1) * 0x1010101
        for index in range(8 // width):
            codes = [codes_in(builder, words, index * width, mask) for words in loaded]
            sums = self._with_operands(operands, row_bytes, 4 * index, INT32, codes, sums, self._dot)
        return sums

    def total(self, sums: list[ir.Value]) -> list[ir.Value]:
        return [self._builder.sitofp(each, FLOATS) for each in sums]

    def _dot(self, builder: ir.IRBuilder, codes: ir.Value, numbers: ir.Value, total: ir.Value) -> ir.Value:
        # Codes are small enough for either.
        unsigned, signed = (numbers, codes) if self._weights_are_unsigned else (codes, numbers)
        return self._multiply_add(builder, unsigned, signed, total)


def codes_in(builder: ir.IRBuilder, words: ir.Value, shift: int, mask: int, is_last: bool = False) -> ir.Value:
    """The codes of each word behind a shift and a mask, which the last ones do not need."""
    shifted = builder.lshr(words, vec.ints(shift)) if shift else words
    return shifted if is_last else builder.and_(shifted, vec.ints(mask))


score_coded_tile = _coded_product(is_wide=True, accumulates=False)
score_narrow_coded_tile = _coded_product(is_wide=False, accumulates=False)
weigh_coded_tile = _coded_product(is_wide=True, accumulates=True)
weigh_narrow_coded_tile = _coded_product(is_wide=False, accumulates=True)
