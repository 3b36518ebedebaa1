"""
What coded weights look like, and the way to it and back.

A weight is a matrix `[rows, columns]`, used as `x @ weight.T`. Sixteen rows are a panel, so that the sums of one vector
are outputs of their own. A panel is read once, from its first byte to its last: for each group of columns a line of
scales and lows, then the codes:
    scales float16 `[16]`
    lows   float16 `[16]`
    words  uint32 `[group * bits / 32, 16]`
A code u stands for `factor * (low + scale * u)`, with a power of two for the whole weight that keeps half precision
exact. The two halves of a word hold codes of neighbouring columns: the lower half those
of columns 0, 2, 4, ..., the upper half those of 1, 3, 5, ...; a shift and a mask give pairs of 16-bit numbers, as dot
products of processors take. What fills up the last panel and the last group is never used.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numba
import numpy as np

from .coding import as_number, extremes, put_codes
from .compiled import Needed, jit, jit_part
from .panel_tiles import CHUNK, WEIGHT_BITS, decode_chunk
from .parallel import share_out, team_of_kernels
from .tiles import nearest
from .vector_ir import CACHE_LINE, LANES

PANEL_ROWS = LANES
# Of a step: weights on a grid, rounded to bfloat16, are off it by less.
_OFF_GRID = np.float32(0.05)


@dataclass(frozen=True)
class PanelLayout:
    """
    Of a coded weight.

    Attributes:
        bits: of a code, one of `WEIGHT_BITS`.
        rows: outputs.
        columns: inputs.
        group: columns that share a scale, a multiple of 32.
        groups: of a row; the last one may be filled up.
        group_words: rows of words in a group.
        panels: of the weight; the last one may be filled up.
    """

    bits: int
    rows: int
    columns: int
    group: int
    # Computed once: a product of every weight asks for every token.
    groups: int = field(init=False)
    group_words: int = field(init=False)
    panels: int = field(init=False)
    panel_bytes: int = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.bits in WEIGHT_BITS
        assert self.group % CHUNK == 0
        groups, panels = -(-self.columns // self.group), -(-self.rows // LANES)
        group_words = self.group * self.bits // 32
        panel_bytes = groups * (1 + group_words) * CACHE_LINE
        computed = {"groups": groups, "group_words": group_words, "panels": panels, "panel_bytes": panel_bytes}
        for name, value in (computed | {"num_bytes": panels * panel_bytes}).items():
            object.__setattr__(self, name, value)

    def part(self, first: int, last: int) -> tuple["PanelLayout", slice]:
        """The layout of panels `first` to `last`, and the bytes that they are."""
        last = min(last, self.panels)
        rows = min(last * LANES, self.rows) - first * LANES
        return PanelLayout(self.bits, rows, self.columns, self.group), slice(
            first * self.panel_bytes, last * self.panel_bytes
        )


class Panels(NamedTuple):
    """One call of `_encode` or `_decode`."""

    numbers: Any  # uint32 (float32 bits) or uint16 (bfloat16 bits) [rows, columns or more]
    columns: int
    shift: int  # from these bits to those of a float32
    words: Any  # uint32 [panels, groups, 1 + group_words, 16]
    bits: int
    factor: float


def factor_of(largest: float) -> float:
    """The factor of a weight whose largest number is of this size: the least for which half precision has it."""
    return float(2.0 ** max(math.frexp(largest)[1] - 15, -126)) if largest else 1.0


def encode_panels(weight: np.ndarray, layout: PanelLayout, factor: float, out: np.ndarray) -> None:
    """
    Code rows of a weight, each group between its least and its largest number.

    Args:
        weight: `[rows, columns]`, float32, or uint16 for bfloat16 bits; contiguous, finite.
        layout: of as many rows.
        factor: of the weight, see `factor_of`.
        out: uint8 `[layout.num_bytes]`, written.
    """
    _encode(*team_of_kernels(), _call(weight, layout, factor, out))


def decode_panels(panels: np.ndarray, layout: PanelLayout, factor: float, out: np.ndarray) -> None:
    """
    Write what coded rows stand for.

    Args:
        panels: uint8 `[layout.num_bytes]`.
        layout: of them.
        factor: of the weight.
        out: as `weight` of `encode_panels`, or with more columns, which are left as they are.
    """
    assert out.shape[0] == layout.rows
    assert out.shape[1] >= layout.columns
    _decode(*team_of_kernels(), _call(out, layout, factor, panels))


def decode_row(panels: np.ndarray, layout: PanelLayout, factor: float, row: int, out: np.ndarray) -> None:
    """Write what one row stands for, to float32 `[layout.columns]`."""
    _decode_row(_words(panels, layout), layout.bits, factor, row, out)


def _words(panels: np.ndarray, layout: PanelLayout) -> np.ndarray:
    assert panels.size == layout.num_bytes
    return panels.view(np.uint32).reshape(layout.panels, layout.groups, 1 + layout.group_words, LANES)


def _call(numbers: np.ndarray, layout: PanelLayout, factor: float, panels: np.ndarray) -> Panels:
    is_single = numbers.dtype == np.float32
    bits = numbers.view(np.uint32) if is_single else numbers
    return Panels(bits, layout.columns, 0 if is_single else 16, _words(panels, layout), layout.bits, factor)


@jit
def _encode(parallel, team, threads, call):
    share_out(parallel, team, threads, call.words.shape[0], _encode_panel, call)


@jit
def _decode(parallel, team, threads, call):
    share_out(parallel, team, threads, call.words.shape[0], _decode_panel, call)


@jit_part
def _place(column, bits):
    """The row of words of a group, and the lowest bit in them, of the codes of one of its columns."""
    in_word = column % (32 // bits)
    return column * bits // 32, np.uint32(in_word // 2 * bits + in_word % 2 * 16)


@jit_part
def _encode_panel(panel, call):
    """Code up to sixteen rows."""
    rows, columns = call.numbers.shape[0], call.columns
    groups, group = call.words.shape[1], (call.words.shape[2] - 1) * (32 // call.bits)
    levels, shift = np.float32((1 << call.bits) - 1), np.uint32(call.shift)
    scaling = np.float32(1 / call.factor)
    codes = np.empty(group, np.uint32)
    numbers = np.empty(group, np.float32)
    first = panel * LANES
    for index in range(groups):
        words = call.words[panel, index]
        halves = words[0].view(np.uint16)
        start, end = index * group, min((index + 1) * group, columns)
        for row in range(words.shape[0]):
            for lane in range(LANES):
                words[row, lane] = 0
        for lane in range(min(LANES, rows - first)):
            for column in range(start, end):
                bits = np.uint32(call.numbers[first + lane, column]) << shift
                numbers[column - start] = as_number(bits) * scaling
            least, most = extremes(numbers[: end - start])
            low_bits = _half_bits(least)
            low = _half(low_bits)
            steps = levels if call.bits > 4 else _steps(numbers[: end - start], least, most, levels)
            scale_bits = _half_bits(max(most - low, np.float32(0)) / steps)
            halves[lane], halves[LANES + lane] = scale_bits, low_bits
            for column in range(end - start):
                codes[column] = 0
            put_codes(numbers[: end - start], _half(scale_bits), low, levels, codes, np.uint32(0))
            for column in range(end - start):
                word, position = _place(column, call.bits)
                words[1 + word, lane] |= codes[column] << position


@jit_part
def _steps(numbers, least, most, levels):
    """
    Of how many steps the range of a group is: fewer than there can be if its numbers lie on such a grid already.

    So weights that were made for codes of 4 bits stay what they are.
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


@jit_part
def _half_bits(number):
    """The nearest half precision, of a number of at most 2 ** 15."""
    bits = np.float32(number).view(np.uint32)
    sign, size = (bits >> np.uint32(16)) & np.uint32(0x8000), bits & np.uint32(0x7FFFFFFF)
    if size < np.uint32(0x38800000):  # too small for an exponent of its own
        return np.uint16(sign | np.uint32(nearest(abs(number) * np.float32(2.0**24))))
    rounded = (size + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
    return np.uint16(sign | (rounded - np.uint32(112 << 10)))


@jit_part
def _half(bits):
    """The number that is of half precision."""
    size = as_number(np.uint32(bits & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112)
    return -size if bits & np.uint32(0x8000) else size


@jit_part
def _decode_panel(panel, call):
    """Write what up to sixteen rows stand for."""
    rows, columns = call.numbers.shape[0], call.columns
    item, row_bytes = call.numbers.itemsize, call.numbers.strides[0]
    group = (call.words.shape[2] - 1) * (32 // call.bits)
    factor, is_bfloat16 = np.float32(call.factor), call.shift > 0
    first = panel * LANES
    height = min(LANES, rows - first)
    out = call.numbers.ctypes.data + first * row_bytes
    tail = np.empty((LANES, CHUNK), call.numbers.dtype)
    for start in range(0, columns, CHUNK):
        index = start // group
        numbers, chunk = call.words[panel, index].ctypes.data, (start - index * group) // CHUNK
        if columns - start >= CHUNK:
            at = out + start * item
            decode_chunk(call.bits, numbers, chunk, height, at, row_bytes, factor, is_bfloat16)
        else:
            decode_chunk(call.bits, numbers, chunk, LANES, tail.ctypes.data, CHUNK * item, factor, is_bfloat16)
            for row in range(height):
                for column in range(columns - start):
                    call.numbers[first + row, start + column] = tail[row, column]


@jit
def _decode_row(words, bits, factor, row, out):
    panel, lane = divmod(row, LANES)
    group, mask = (words.shape[2] - 1) * (32 // bits), np.uint32((1 << bits) - 1)
    for column in range(out.size):
        index = column // group
        word, position = _place(column - index * group, bits)
        code = np.float32((words[panel, index, 1 + word, lane] >> position) & mask)
        halves = words[panel, index, 0].view(np.uint16)
        scale, low = _half(np.uint32(halves[lane])), _half(np.uint32(halves[LANES + lane]))
        out[column] = np.float32(factor) * (low + scale * code)


def panel_kernels(element: np.dtype) -> list[Needed]:
    """What codes weights that kernels see as `element`, and decodes them."""
    number, words = numba.int64, numba.uint32[:, :, :, ::1]
    numbers = (numba.uint16 if element == np.uint16 else numba.uint32)[:, ::1]
    kinds = {"numbers": numbers, "words": words, "factor": numba.float64}
    call = numba.types.NamedTuple([kinds.get(field, number) for field in Panels._fields], Panels)
    of_row = words, number, numba.float64, number, numba.float32[::1]
    return [*((kernel, (number, number, number, call)) for kernel in (_encode, _decode)), (_decode_row, of_row)]
