"""
The three steps of attention for four query rows and one block of 64 tokens, of one KV head: scores, softmax, values.

Two of them are products of tiles: four rows of an operand times the columns of a block. One generator, `multiply`,
writes the code for all kinds of columns (`code_tiles` has more kinds). The sums of a tile stay in registers: four rows
by 64 columns are sixteen of the 32 registers of AVX-512. With fewer or narrower registers a tile is 16 columns wide; so
are those of the columns that wide tiles leave. Addresses are integers, because Numba has no name for some element
types.

Element types: `float32`; `uint16` is bfloat16, the upper half of a float32; `int16` is IEEE half precision.

The processor may multiply two pairs of bfloat16 and add both products to a float32 in one instruction (AVX512-BF16). A
product of two bfloat16 is exact in float32, but the instruction takes numbers smaller than 1.2e-38 for zero. Packed
keys are `[key_dim / 2, 64]`, two channels of a token in 32 bits; packed values are `[32, width]`, two tokens of a
channel.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .dots import MultiplyAdd, multiply_pairs
from .processor import has_bfloat16_products, has_feature
from .vector_ir import BLOCK, FLOAT, FLOATS, INT16, INT32, INT64, INTS, ITEM_BYTES, LANES

ROWS = 4
_ROW_BYTES = INT64(BLOCK * 4)


class Rows(NamedTuple):
    """Four rows of numbers: of an operand, or of a result."""

    address: ir.Value
    stride: ir.Value  # bytes from a row to the next one

    def place(self, builder: ir.IRBuilder, row: int, offset: ir.Value) -> ir.Value:
        """The address of a number of a row."""
        return builder.add(self.address, builder.add(builder.mul(INT64(row), self.stride), offset))

    def number(self, builder: ir.IRBuilder, row: int, offset: int, kind: ir.Type) -> ir.Value:
        """The number, pair or four of numbers of `kind` at an offset in a row, in all lanes."""
        return vec.splat(builder, vec.load(builder, self.place(builder, row, INT64(offset)), kind))


class Columns(NamedTuple):
    """Rows of columns, all numbers of which are multiplied with the same numbers of the operand."""

    address: ir.Value
    row_bytes: ir.Value
    rows: ir.Value  # at least one
    range: tuple[ir.Value, ir.Value] | None = None  # the first and the end, multiples of 16 apart; `None` for `BLOCK`
    ahead: ir.Value | None = None  # address to prefetch, as many bytes as are read


class Results(NamedTuple):
    """
    The outputs that are written: `corrections * before + steps * sums + constants`.

    Each of the factors and constants is an address of float32 `[ROWS]`. The first term is missing without
    `corrections`; without `steps` and `constants` the sums remain as they are.
    """

    rows: Rows
    corrections: ir.Value | None = None
    steps: ir.Value | None = None
    constants: ir.Value | None = None


class Source(ABC):
    """A kind of columns: how a row of them is loaded, multiplied and added to the sums, row by row of the operand."""

    item = 4  # bytes of a column in a row
    rows = 1  # rows of columns to load at once
    step = 4  # bytes of a row of the operand that are multiplied with them
    zero = vec.floats(0.0)

    def __init__(self, context: Any, builder: ir.IRBuilder):
        self.context, self.builder = context, builder

    def load(self, addresses: list[ir.Value], vectors: int) -> list[ir.Value]:
        """Load vectors of columns that follow each other in each row, given the addresses of the rows."""
        builder, places = self.builder, [INT64(index * LANES * 4) for index in range(vectors)]
        return [vec.load(builder, builder.add(address, place), INTS) for address in addresses for place in places]

    @abstractmethod
    def add(self, columns: list[ir.Value], operand: Rows, sums: list[ir.Value]) -> list[ir.Value]:
        """`sums` plus the products of a row of columns with its numbers of the operand, which are the first there."""

    def as_loaded(self, sums: list[ir.Value]) -> list[ir.Value]:
        """Bring floats from the order of memory to the order of the sums."""
        return sums

    def in_order(self, sums: list[ir.Value]) -> list[ir.Value]:
        """`sums` as floats in the order of memory."""
        return sums

    def _with_each_row(
        self,
        columns: list[ir.Value],
        operand: Rows,
        offset: int,
        kind: ir.Type,
        sums: list[ir.Value],
        multiply_add: MultiplyAdd,
    ) -> list[ir.Value]:
        """`sums` plus `columns` times the number of `kind` that each row of the operand has at an offset."""
        builder, count, results = self.builder, len(columns), []
        for row in range(ROWS):
            number = operand.number(builder, row, offset, kind)
            of_row = sums[row * count : (row + 1) * count]
            results += [multiply_add(builder, each, number, total) for each, total in zip(columns, of_row, strict=True)]
        return results


def multiply(source: Source, operand: Rows, columns: Columns, results: Results) -> None:
    """Multiply four rows of an operand with columns, in wide tiles and then in narrow ones."""
    builder = source.builder
    add, times = builder.add, builder.mul

    def multiply_tile(column: ir.Value, vectors: int) -> None:
        start, first = times(column, INT64(source.item)), times(column, INT64(4))
        offsets = [add(first, INT64(vector * LANES * 4)) for vector in range(vectors)]
        places = [results.rows.place(builder, row, offset) for row in range(ROWS) for offset in offsets]

        def add_row(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            first_row = times(index, INT64(source.rows))
            offsets = [add(times(add(first_row, INT64(k)), columns.row_bytes), start) for k in range(source.rows)]
            loaded = source.load([add(columns.address, offset) for offset in offsets], vectors)
            if columns.ahead is not None:
                for offset in offsets:
                    vec.prefetch(builder, add(columns.ahead, offset), vectors * LANES * source.item)
            numbers = Rows(add(operand.address, times(index, INT64(source.step))), operand.stride)
            return source.add(loaded, numbers, sums)

        count = builder.sdiv(columns.rows, INT64(source.rows))
        sums = vec.loop(builder, count, _first_sums(source, results, places), add_row)
        _store(builder, results, places, source.in_order(sums))

    def multiply_tiles(first: ir.Value, end: ir.Value, vectors: int) -> ir.Value:
        """Multiply all whole tiles of a width; the result is the column after them."""
        width = INT64(vectors * LANES)
        count = builder.sdiv(builder.sub(end, first), width)

        def multiply_next(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            multiply_tile(add(first, times(index, width)), vectors)
            return []

        with builder.if_then(builder.icmp_signed(">", count, INT64(0))):
            vec.loop(builder, count, [], multiply_next)
        return add(first, times(count, width))

    wide = 4 if has_feature(source.context, "avx512f") else 1
    if columns.range is None:
        multiply_tiles(INT64(0), INT64(BLOCK), wide)
        return
    first, end = columns.range
    if wide > 1:
        first = multiply_tiles(first, end, wide)
    multiply_tiles(first, end, 1)


def _first_sums(source: Source, results: Results, places: list[ir.Value]) -> list[ir.Value]:
    """The sums to begin with: what the results are before, corrected, if nothing else becomes of the sums."""
    if results.corrections is None or results.steps is not None:
        return [source.zero] * len(places)
    builder = source.builder
    pairs = zip(places, _of_places(builder, results.corrections, places), strict=True)
    return source.as_loaded([builder.fmul(vec.load(builder, place, FLOATS), factor) for place, factor in pairs])


def _store(builder: ir.IRBuilder, results: Results, places: list[ir.Value], sums: list[ir.Value]) -> None:
    if results.steps is not None:
        steps, constants = (_of_places(builder, each, places) for each in (results.steps, results.constants))
        sums = [vec.multiply_add(builder, *each) for each in zip(sums, steps, constants, strict=True)]
        if results.corrections is not None:
            before = [vec.load(builder, place, FLOATS) for place in places]
            corrections = _of_places(builder, results.corrections, places)
            sums = [vec.multiply_add(builder, *each) for each in zip(before, corrections, sums, strict=True)]
    for place, total in zip(places, sums, strict=True):
        vec.store(builder, total, place)


def _of_places(builder: ir.IRBuilder, address: ir.Value, places: list[ir.Value]) -> list[ir.Value]:
    """Load float32 `[ROWS]`, and give each of `places` the number of its row in all lanes."""
    addresses = [builder.add(address, INT64(row * 4)) for row in range(ROWS)]
    numbers = [vec.splat(builder, vec.load(builder, each, FLOAT)) for each in addresses]
    return [number for number in numbers for _ in range(len(places) // ROWS)]


class _Numbers(Source):
    """Numbers of an element type, which become floats."""

    def __init__(self, context: Any, builder: ir.IRBuilder, element: Any):
        super().__init__(context, builder)
        self._element, self.item = element, ITEM_BYTES[element]

    def load(self, addresses: list[ir.Value], vectors: int) -> list[ir.Value]:
        return vec.load_vectors(self.context, self.builder, self._element, addresses[0], vectors)

    def add(self, columns: list[ir.Value], operand: Rows, sums: list[ir.Value]) -> list[ir.Value]:
        return self._with_each_row(columns, operand, 0, FLOAT, sums, vec.multiply_add)

    def as_loaded(self, sums: list[ir.Value]) -> list[ir.Value]:
        return vec.as_loaded(self.builder, self._element, sums, len(sums) // ROWS)

    def in_order(self, sums: list[ir.Value]) -> list[ir.Value]:
        return vec.in_order(self.builder, self._element, sums, len(sums) // ROWS)


class _Pairs(Source):
    """Packed pairs of bfloat16."""

    def add(self, columns: list[ir.Value], operand: Rows, sums: list[ir.Value]) -> list[ir.Value]:
        return self._with_each_row(columns, operand, 0, INT32, sums, multiply_pairs)


class _TwoRows(_Pairs):
    """Two rows of a block of bfloat16, whose numbers become pairs as they are loaded; only for wide tiles."""

    item, rows = 2, 2

    def load(self, addresses: list[ir.Value], vectors: int) -> list[ir.Value]:
        builder, kind = self.builder, ir.VectorType(INT16, 2 * LANES)
        places = [INT64(index * LANES * 4) for index in range(vectors // 2)]
        loaded = [[vec.load(builder, builder.add(row, place), kind) for place in places] for row in addresses]
        return [
            builder.bitcast(vec.shuffle(builder, even, odd, lanes), INTS)
            for even, odd in zip(*loaded, strict=True)
            for lanes in (_interleaved(0), _interleaved(4))
        ]

    def in_order(self, sums: list[ir.Value]) -> list[ir.Value]:
        # The lanes of 32 tokens' sums, in order, in the two vectors of sums that the interleaved rows give.
        places = [four // 2 * 4 + four % 2 * LANES + lane for four in range(2 * LANES // 4) for lane in range(4)]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        halves = places[:LANES], places[LANES:]
        return [vec.shuffle(self.builder, lower, upper, half) for lower, upper in pairs for half in halves]


def _interleaved(first: int) -> list[int]:
    """Lanes that pair two vectors of 32: of each eight lanes the four from `first` on, which is one instruction."""
    starts = [eight + first + index for eight in range(0, 2 * LANES, 8) for index in range(4)]
    return [start + vector * 2 * LANES for start in starts for vector in range(2)]


def _write_scores(
    source: Source,
    query: Rows,
    keys: ir.Value,
    rows: ir.Value,
    scores: ir.Value,
    ahead: ir.Value | None = None,
) -> None:
    columns = Columns(keys, INT64(BLOCK * source.item), rows, ahead=ahead)
    multiply(source, query, columns, Results(Rows(scores, _ROW_BYTES)))


def _add_weighted(
    source: Source,
    weights: ir.Value,
    values: ir.Value,
    rows: ir.Value,
    width: ir.Value,
    corrections: ir.Value,
    out: ir.Value,
    ahead: ir.Value | None = None,
) -> None:
    times = source.builder.mul
    columns = Columns(values, times(width, INT64(source.item)), rows, (INT64(0), width), ahead)
    results = Results(Rows(out, times(width, INT64(4))), corrections)
    multiply(source, Rows(weights, _ROW_BYTES), columns, results)


@intrinsic
def score(
    typing_context: Any, element: Any, query: Any, stride: Any, keys: Any, count: Any, scores: Any, ahead: Any
) -> Any:
    """
    Write `scores = query @ keys`.

    query: address of float32 rows, `stride` bytes apart, each `[count]`; keys: address of one block of `element`,
    `[count, BLOCK]`; scores: address of float32 `[ROWS, BLOCK]`; ahead: address to prefetch, row by row.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _, query, stride, *others = arguments
        _write_scores(_Numbers(context, builder, element), Rows(query, stride), *others)
        return context.get_dummy_value()

    return types.void(element, *[types.int64] * 6), generate


@intrinsic
def score_bfloat16(
    typing_context: Any, element: Any, query: Any, stride: Any, keys: Any, count: Any, scores: Any, ahead: Any
) -> Any:
    """
    Write `scores = query @ keys`, or nothing if keys are not bfloat16 or the processor lacks the instruction.

    query: address of bfloat16 rows, `stride` bytes apart, each `[count]`, an even number; the others as in `score`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if element == types.uint16 and has_bfloat16_products():
            _, query, stride, *others = arguments
            _write_scores(_TwoRows(context, builder), Rows(query, stride), *others)
        return context.get_dummy_value()

    return types.void(element, *[types.int64] * 6), generate


@intrinsic
def score_pairs(typing_context: Any, query: Any, stride: Any, keys: Any, pairs: Any, scores: Any) -> Any:
    """
    Write `scores = query @ keys`, or nothing if the processor lacks the instruction.

    query: address of rows of pairs, `stride` bytes apart; keys: address of packed keys, `[pairs, BLOCK]`; scores:
    address of float32 `[ROWS, BLOCK]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if has_bfloat16_products():
            query, stride, *others = arguments
            _write_scores(_Pairs(context, builder), Rows(query, stride), *others)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def weigh(
    typing_context: Any,
    element: Any,
    weights: Any,
    values: Any,
    count: Any,
    width: Any,
    corrections: Any,
    out: Any,
    ahead: Any,
) -> Any:
    """
    Correct `out` and add `weights @ values` to it.

    weights: address of float32 `[ROWS, BLOCK]`; values: address of one block of `element`, `[BLOCK, width]`, of which
    the first `count` rows are read; corrections: address of float32 `[ROWS]`; out: address of float32 `[ROWS, width]`;
    ahead: address to prefetch, row by row.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _add_weighted(_Numbers(context, builder, element), *arguments[1:])
        return context.get_dummy_value()

    return types.void(element, *[types.int64] * 7), generate


@intrinsic
def weigh_pairs(
    typing_context: Any, weights: Any, values: Any, pairs: Any, width: Any, corrections: Any, out: Any
) -> Any:
    """
    Correct `out` and add `weights @ values` to it, or do nothing if the processor lacks the instruction.

    weights: address of rows of pairs, `BLOCK * 4` bytes apart, as `softmax_pairs` leaves them; values: address of
    packed values, `[pairs, width]`; corrections: address of float32 `[ROWS]`; out: address of float32 `[ROWS, width]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if has_bfloat16_products():
            _add_weighted(_Pairs(context, builder), *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _softmax(degree: int, has_pairs: bool = False) -> Callable[..., Any]:
    """An intrinsic that turns scores into weights, which are pairs of bfloat16 if the processor multiplies those."""

    def softmax(typing_context: Any, scores: Any, factor: Any, maxima: Any, sums: Any, corrections: Any) -> Any:
        """
        Turn scores into weights relative to a running maximum (online softmax, arXiv:1805.02867).

        It makes weights `2 ** (factor * scores - maximum)`, updates the maximum and the sum of each row for this block,
        and writes the factor that corrects earlier sums, which are relative to the old maximum. If a score of a row is
        NaN, the sum of the row becomes NaN.

        scores: address of float32 `[ROWS, BLOCK]`, over which weights are written; factor; maxima, sums, corrections:
        addresses of float32 `[ROWS]`.
        """

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            scores, factor, maxima, sums, corrections = arguments
            offsets = [[(row * BLOCK + first) * 4 for first in range(0, BLOCK, LANES)] for row in range(ROWS)]
            places = [[builder.add(scores, INT64(offset)) for offset in row] for row in offsets]
            # The maximum is of the scaled scores themselves, so no exponent is above 0, however large the scores.
            factor = vec.splat(builder, factor)
            scaled = [[builder.fmul(vec.load(builder, place, FLOATS), factor) for place in row] for row in places]
            highest = vec.fold(builder, [vec.reduced(builder, row, vec.maximum) for row in scaled], vec.maximum)
            old = vec.load_four(builder, maxima)
            new = vec.maximum(builder, highest, old)
            vec.store_four(builder, new, maxima)
            # -inf - -inf would be NaN if a row sees no token.
            nothing = builder.fcmp_ordered("==", new, vec.floats(float("-inf")))
            base = builder.select(nothing, vec.floats(0.0), new)
            correction = vec.exp2(context, builder, builder.fsub(old, base), 6)
            vec.store_four(builder, correction, corrections)
            added = []
            for row, vectors in enumerate(scaled):
                row_base = vec.splat_fourth(builder, base, row)
                weights = [vec.exp2(context, builder, builder.fsub(vector, row_base), degree) for vector in vectors]
                added.append(vec.reduced(builder, weights, vec.add))
                if has_pairs and has_bfloat16_products():
                    weights = _rounded_pairs(builder, weights)
                for weight, place in zip(weights, places[row], strict=False):
                    vec.store(builder, weight, place)
            before = builder.fmul(vec.load_four(builder, sums), correction)
            vec.store_four(builder, builder.fadd(before, vec.fold(builder, added, vec.add)), sums)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), generate

    made: Callable[..., Any] = intrinsic(softmax)
    return made


def _rounded_pairs(builder: ir.IRBuilder, weights: list[ir.Value]) -> list[ir.Value]:
    """Pairs of bfloat16, by AVX512-BF16: half as many vectors."""
    join = ir.FunctionType(ir.VectorType(INT16, 2 * LANES), [FLOATS, FLOATS])
    return [
        builder.asm(join, "vcvtne2ps2bf16 $2, $1, $0", "=v,v,v", [high, low], False)
        for low, high in zip(weights[::2], weights[1::2], strict=True)
    ]


softmax_tile = _softmax(6)
# A lower degree is enough for weights that are rounded, to bfloat16 or to integers.
softmax_pairs, softmax_codes = _softmax(4, has_pairs=True), _softmax(4)
