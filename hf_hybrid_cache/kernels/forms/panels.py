"""
Panels: quantized weights in memory, quantization and dequantization.

A weight is a matrix `[rows, columns]`, used as `x @ weight.T`. Sixteen rows are a panel, so that each lane of a vector
is the sum of one output. A panel is read once, from its first byte to its last. For each group of columns it has a line
of scales and minima, then the codes:
    scales float16 `[16]`
    minima float16 `[16]`
    words  uint32 `[group * bits / 32, 16]`
A code u stands for `factor * (minimum + scale * u)`. The factor is a power of two for the whole weight, which keeps
numbers within half precision. The lower half of a word holds the codes of columns 0, 2, 4, ..., the upper half those of
1, 3, 5, ...; a shift and a mask give pairs of 16-bit numbers, or fours of 8-bit numbers, as the processor's dot
products take. The padding of the last panel and of the last group is never used.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.code_tiles import codes_in
from ..vector.compiled import Needed, jit, jit_function, taking_numbers
from ..vector.intrinsics import call_at, nearest
from ..vector.numbers_at import Numbers, array_at, as_double, as_number, bits_of_double, load_numbers, store_numbers
from ..vector.parallel import split_work, team_of_kernels
from ..vector.vector_ir import CACHE_LINE, FLOATS, INT64, INTS, LANES, load_vectors, transposed
from .blocks import extremes, put_codes

# Bits of a code of a weight, the best quality first.
WEIGHT_BITS = (8, 4)
PANEL_ROWS = LANES
# Columns that are dequantized, or multiplied with many tokens, at a time; groups are multiples of it.
STRIP = 32
# By the bits of a code: the columns whose codes are the bytes of a word, then those of the word shifted by a code.
QUADS = {8: ((0, 2, 1, 3),), 4: ((0, 4, 1, 5), (2, 6, 3, 7))}
# Part of a step. Weights on a grid, rounded to bfloat16, are nearer to it than that.
_OFF_GRID = np.float32(0.05)
_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True)
class PanelLayout:
    """
    Layout of a quantized weight.

    Attributes:
        bits: of a code, one of `WEIGHT_BITS`.
        rows: outputs.
        columns: inputs.
        group: columns that share a scale, a multiple of 32.
    """

    bits: int
    rows: int
    columns: int
    group: int

    def __post_init__(self) -> None:
        assert self.bits in WEIGHT_BITS
        assert self.group % STRIP == 0

    @property
    def groups(self) -> int:
        """Number of groups in a row; the last one may be padded."""
        return -(-self.columns // self.group)

    @property
    def group_words(self) -> int:
        """Rows of words in a group."""
        return self.group * self.bits // 32

    @property
    def panels(self) -> int:
        """Number of panels; the last one may be padded."""
        return -(-self.rows // PANEL_ROWS)

    @property
    def panel_bytes(self) -> int:
        return self.groups * (1 + self.group_words) * CACHE_LINE

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight."""
        return self.panels * self.panel_bytes


class PanelCoding(NamedTuple):
    """One call of `_encode` or `_decode`."""

    numbers: int  # address of float32 or bfloat16 [rows, columns or more]
    is_bfloat16: int
    row_bytes: int
    rows: int
    columns: int
    panels: int  # address of the panels of these rows
    bits: int
    group: int
    factor: int  # as the bits of a float64


def factor_of(largest: float) -> float:
    """The factor of a weight: the least power of two for which its largest number is within half precision."""
    return float(2.0 ** max(math.frexp(largest)[1] - 15, -126)) if largest else 1.0


def quantize_panels(weight: np.ndarray, layout: PanelLayout, factor: float, out: np.ndarray, first: int = 0) -> None:
    """
    Quantize rows of a weight, each group between its least and its largest number.

    Args:
        weight: `[rows, columns]`, the rows of the panels from `first` on, of all of these panels or fewer; float32, or
            uint16 for bfloat16 bits; contiguous, finite.
        layout: of the whole weight.
        factor: of the weight, see `factor_of`.
        out: uint8 `[layout.num_bytes]`, of which these panels are written.
        first: index of the first panel.
    """
    call = _coding(weight, layout, factor, out, first)
    _encode(team_of_kernels().address, call.ctypes.data)


def dequantize_panels(panels: np.ndarray, layout: PanelLayout, factor: float, out: np.ndarray, first: int = 0) -> None:
    """
    Dequantize rows of a weight.

    Args:
        panels: uint8 `[layout.num_bytes]`.
        layout: of the whole weight.
        factor: of the weight.
        out: written, as `weight` of `quantize_panels`, or with more columns, which stay as they are.
        first: index of the first panel.
    """
    call = _coding(out, layout, factor, panels, first)
    _decode(team_of_kernels().address, call.ctypes.data)


def _coding(numbers: np.ndarray, layout: PanelLayout, factor: float, panels: np.ndarray, first: int) -> np.ndarray:
    assert panels.size == layout.num_bytes
    assert len(numbers) <= layout.rows - first * PANEL_ROWS
    assert numbers.shape[1] >= layout.columns
    call = PanelCoding(
        numbers=numbers.ctypes.data,
        is_bfloat16=numbers.dtype == np.uint16,
        row_bytes=numbers.strides[0],
        rows=len(numbers),
        columns=layout.columns,
        panels=panels.ctypes.data + first * layout.panel_bytes,
        bits=layout.bits,
        group=layout.group,
        factor=bits_of_double(factor),
    )
    return np.array(call, np.int64)


@jit
def _encode(team, call):
    split_work(team, (call_at(call, PanelCoding).rows + LANES - 1) // LANES, _encode_panel, call)


@jit
def _decode(team, call):
    split_work(team, (call_at(call, PanelCoding).rows + LANES - 1) // LANES, _decode_panel, call)


def panel_kernels() -> list[Needed]:
    """The kernels that quantize weights and dequantize them."""
    return [(kernel, taking_numbers(kernel)) for kernel in (_encode, _decode)]


@jit_function
def _lines(call, panel):
    """A panel as uint32 `[groups, 1 + words of a group, LANES]`."""
    groups, lines = (call.columns + call.group - 1) // call.group, 1 + call.group * call.bits // 32
    at = call.panels + panel * groups * lines * CACHE_LINE
    return array_at(at, (groups, lines, LANES), np.uint32(0))


@jit_function
def _encode_panel(panel, at):
    """Quantize the rows of a panel."""
    call = call_at(at, PanelCoding)
    lines, group = _lines(call, panel), call.group
    levels, scaling = np.float32((1 << call.bits) - 1), np.float32(1 / as_double(call.factor))
    top = _LARGEST * scaling  # more would be decoded to infinity
    codes, loaded = np.empty(group, np.uint32), np.empty(group, np.float32)
    first = panel * LANES
    lines[:] = 0
    for lane in range(min(LANES, call.rows - first)):
        row = Numbers(call.numbers + (first + lane) * call.row_bytes, call.is_bfloat16 != 0)
        for index in range(len(lines)):
            start, words = index * group, lines[index]
            numbers = loaded[: min(group, call.columns - start)]
            load_numbers(row, start, numbers.size, numbers)
            for column in range(numbers.size):
                numbers[column] *= scaling
            least, most = extremes(numbers)
            minimum_bits = _half_bits(least)
            if abs(_half(minimum_bits)) > top:
                minimum_bits = np.uint16(minimum_bits - 1)
            minimum = _half(minimum_bits)
            steps = levels if call.bits > 4 else _steps(numbers, least, most, levels)
            scale_bits = _half_bits(max(most - minimum, np.float32(0)) / steps)
            if minimum + _half(scale_bits) * steps > top:
                scale_bits = np.uint16(scale_bits - 1)
            halves = words[0].view(np.uint16)
            halves[lane], halves[LANES + lane] = scale_bits, minimum_bits
            codes[:] = 0
            put_codes(numbers, _half(scale_bits), minimum, levels, codes, np.uint32(0))
            for column in range(numbers.size):
                in_word = column % (32 // call.bits)
                position = np.uint32(in_word // 2 * call.bits + in_word % 2 * 16)
                words[1 + column * call.bits // 32, lane] |= codes[column] << position


@jit_function
def _steps(numbers, least, most, levels):
    """
    The number of steps between the least and the largest number of a group.

    It is smaller than `levels` if the numbers lie on such a grid already: weights that come from codes of 4 bits do not
    change.
    """
    for steps in range(int(levels), 1, -1):
        scale = (most - least) / np.float32(steps)
        on_grid = scale > 0
        index = 0
        while on_grid and index < numbers.size:
            place = (numbers[index] - least) / scale
            on_grid = abs(place - nearest(place)) < _OFF_GRID
            index += 1
        if on_grid:
            return np.float32(steps)
    return levels


@jit_function
def _half_bits(number):
    """The bits of the nearest half precision number, for a number of at most 2 ** 15."""
    bits = np.float32(number).view(np.uint32)
    sign, size = (bits >> np.uint32(16)) & np.uint32(0x8000), bits & np.uint32(0x7FFFFFFF)
    if size < np.uint32(0x38800000):  # too small for an exponent of its own
        return np.uint16(sign | np.uint32(nearest(abs(number) * np.float32(2.0**24))))
    rounded = (size + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
    return np.uint16(sign | (rounded - np.uint32(112 << 10)))


@jit_function
def _half(bits):
    """The number that has these bits in half precision."""
    size = as_number(np.uint32(bits & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112)
    return -size if bits & np.uint32(0x8000) else size


@jit_function
def _decode_panel(panel, at):
    """Dequantize the rows of a panel."""
    call = call_at(at, PanelCoding)
    lines, factor = _lines(call, panel), np.float32(as_double(call.factor))
    is_bfloat16, item = call.is_bfloat16 != 0, 2 if call.is_bfloat16 else 4
    height, out = min(LANES, call.rows - panel * LANES), call.numbers + panel * LANES * call.row_bytes
    last = np.empty((LANES, STRIP), np.float32)
    for start in range(0, call.columns, STRIP):
        index = start // call.group
        group, strip = lines[index].ctypes.data, (start - index * call.group) // STRIP
        if call.columns - start >= STRIP:
            to = out + start * item
            decode_strip(call.bits, group, strip, height, to, call.row_bytes, factor, is_bfloat16)
        else:
            decode_strip(call.bits, group, strip, LANES, last.ctypes.data, STRIP * 4, factor, False)
            for row in range(height):
                store_numbers(last[row], Numbers(out + row * call.row_bytes, is_bfloat16), start, call.columns - start)


@intrinsic
def decode_strip(
    typing_context: Any,
    bits: Any,
    group: Any,
    strip: Any,
    rows: Any,
    out: Any,
    row_bytes: Any,
    factor: Any,
    is_bfloat16: Any,
) -> Any:
    """
    Dequantize `STRIP` columns of a group of a panel.

    bits: of a code; group: address; strip: its index in the group; rows: number of rows to write; out: address of the
    first row, float32 or bfloat16; row_bytes: between rows; factor: of the weight.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, group, strip, rows, out, row_bytes, factor, is_bfloat16 = arguments
        add, multiply = builder.add, builder.mul
        by = vec.splat(builder, factor)
        scale, minimum = (builder.fmul(each, by) for each in scales_and_minima(context, builder, group))

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

        def run(width: int) -> None:
            lines = strip_lines(width)
            first = add(add(group, INT64(CACHE_LINE)), multiply(strip, INT64(lines * CACHE_LINE)))
            columns = decoded(load_lines(builder, first, lines), width)
            with builder.if_else(is_bfloat16) as (then, otherwise):
                with then:
                    pairs = zip(columns[::2], columns[1::2], strict=True)
                    write([_bfloat16_pair(builder, *pair) for pair in pairs], 0)
                with otherwise:
                    for half in range(2):
                        part = columns[half * LANES : (half + 1) * LANES]
                        write([builder.bitcast(each, INTS) for each in part], half * LANES * 4)

        for_width(builder, bits, run)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32, types.boolean), generate


def _bfloat16_pair(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Round two vectors of finite floats to bfloat16, and join them in lanes of 32 bits."""
    first, second = (vec.rounded_to_bfloat16(builder, numbers) for numbers in (low, high))
    return builder.or_(builder.lshr(first, vec.ints(16)), builder.and_(second, vec.ints(0xFFFF0000)))


# What products read.


def for_width(builder: ir.IRBuilder, bits: ir.Value, run: Callable[[int], None]) -> None:
    """Generate code by `run(width)` for each of `WEIGHT_BITS`; that of `bits` runs."""
    for width in WEIGHT_BITS:
        with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
            run(width)


def strip_lines(width: int) -> int:
    """Rows of words in a strip."""
    return STRIP * width // 32


def load_lines(builder: ir.IRBuilder, address: ir.Value, count: int) -> list[ir.Value]:
    """Load rows of words that follow each other."""
    return [vec.load(builder, builder.add(address, INT64(index * CACHE_LINE)), INTS) for index in range(count)]


def scales_and_minima(context: Any, builder: ir.IRBuilder, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Load the scales and the minima of the group of a panel that begins at an address."""
    addresses = address, builder.add(address, INT64(2 * LANES))
    scale, minimum = (load_vectors(context, builder, types.int16, each, 1)[0] for each in addresses)
    return scale, minimum


def pairs_of_codes(builder: ir.IRBuilder, words: ir.Value, width: int) -> Iterator[ir.Value]:
    """The codes of a row of words, widened to 16 bits: two in each lane, in the order of columns."""
    for pair in range(16 // width):
        yield codes_in(builder, words, pair * width, (2**width - 1) * 0x10001)


def quads_of_codes(builder: ir.IRBuilder, words: ir.Value, width: int) -> Iterator[ir.Value]:
    """The codes of a row of words, widened to 8 bits: four in each lane, in the order of `QUADS`."""
    for quad in range(len(QUADS[width])):
        yield words if width == 8 else codes_in(builder, words, quad * width, 0x0F0F0F0F)


def order_of_quads(width: int, columns: int) -> list[list[int]]:
    """The columns in the order of their codes: a list for each four that are bytes of one word."""
    return [[first + column for column in quad] for first in range(0, columns, 32 // width) for quad in QUADS[width]]
