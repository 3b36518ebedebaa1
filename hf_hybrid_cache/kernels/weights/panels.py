"""
Layout of quantized weights, quantization and dequantization.

A weight is a matrix `[rows, columns]`, used as `x @ weight.T`. Sixteen rows are a panel, so that each lane of a vector
is the sum of one output. A panel is read once, from its first byte to its last. For each group of columns it has a line
of scales and minima, then the codes:
    scales float16 `[16]`
    minima float16 `[16]`
    words  uint32 `[group * bits / 32, 16]`
A code u stands for `factor * (minimum + scale * u)`. The factor is a power of two for the whole weight, which keeps
numbers within half precision. The lower half of a word holds the codes of columns 0, 2, 4, ..., the upper half those of
1, 3, 5, ...; a shift and a mask give pairs of 16-bit numbers, as the processor's dot products take. The padding of the
last panel and of the last group is never used.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import float32, float64, int64, uint16, uint32

from ..quantized.quantization import as_number, extremes, put_codes
from ..vector.calls import kernel_call, taking
from ..vector.compiled import Needed, jit, jit_function
from ..vector.parallel import split_work, team_of_kernels
from ..vector.tiles import nearest
from ..vector.vector_ir import CACHE_LINE, LANES
from .panel_tiles import CHUNK, WEIGHT_BITS, decode_chunk

PANEL_ROWS = LANES
# Part of a step. Weights on a grid, rounded to bfloat16, are nearer to it than that.
_OFF_GRID = np.float32(0.05)


@dataclass(frozen=True)
class PanelLayout:
    """
    Layout of a quantized weight.

    Attributes:
        bits: of a code, one of `WEIGHT_BITS`.
        rows: outputs.
        columns: inputs.
        group: columns that share a scale, a multiple of 32.
        groups: number of groups in a row; the last one may be padded.
        group_words: rows of words in a group.
        panels: number of panels; the last one may be padded.
        panel_bytes: bytes of a panel.
        num_bytes: bytes of the weight.
    """

    bits: int
    rows: int
    columns: int
    group: int
    # Computed once: each product with the weight uses these.
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
        """The layout of the panels from `first` to before `last`, and their bytes in the weight."""
        last = min(last, self.panels)
        rows = min(last * LANES, self.rows) - first * LANES
        return PanelLayout(self.bits, rows, self.columns, self.group), slice(
            first * self.panel_bytes, last * self.panel_bytes
        )


def _bits_of_weights(element: np.dtype) -> Any:
    return (uint16 if element == np.uint16 else uint32)[:, ::1]


# One call of `_encode` or `_decode`.
Panels = kernel_call(
    "Panels",
    __name__,
    {
        "numbers": _bits_of_weights,  # float32 or bfloat16 bits [rows, columns or more]
        "columns": int64,
        "shift": int64,  # from these bits to those of a float32
        "words": uint32[:, :, :, ::1],  # [panels, groups, 1 + group_words, LANES]
        "bits": int64,
        "factor": float64,
    },
)


def factor_of(largest: float) -> float:
    """The factor of a weight: the least power of two for which its largest number is within half precision."""
    return float(2.0 ** max(math.frexp(largest)[1] - 15, -126)) if largest else 1.0


def quantize_panels(weight: np.ndarray, layout: PanelLayout, factor: float, out: np.ndarray) -> None:
    """
    Quantize rows of a weight, each group between its least and its largest number.

    Args:
        weight: `[rows, columns]`, float32, or uint16 for bfloat16 bits; contiguous, finite.
        layout: of as many rows.
        factor: of the weight, see `factor_of`.
        out: uint8 `[layout.num_bytes]`, written.
    """
    _encode(team_of_kernels().address, _call(weight, layout, factor, out))


def dequantize_panels(panels: np.ndarray, layout: PanelLayout, factor: float, out: np.ndarray) -> None:
    """
    Dequantize rows of a weight.

    Args:
        panels: uint8 `[layout.num_bytes]`.
        layout: of the panels.
        factor: of the weight.
        out: written, as `weight` of `quantize_panels`, or with more columns, which stay as they are.
    """
    assert out.shape[0] == layout.rows
    assert out.shape[1] >= layout.columns
    _decode(team_of_kernels().address, _call(out, layout, factor, panels))


def dequantize_row(panels: np.ndarray, layout: PanelLayout, factor: float, row: int, out: np.ndarray) -> None:
    """Dequantize one row to float32 `[layout.columns]`."""
    _dequantize_row(_words(panels, layout), layout.bits, factor, row, out)


def _words(panels: np.ndarray, layout: PanelLayout) -> np.ndarray:
    assert panels.size == layout.num_bytes
    return panels.view(np.uint32).reshape(layout.panels, layout.groups, 1 + layout.group_words, LANES)


def _call(numbers: np.ndarray, layout: PanelLayout, factor: float, panels: np.ndarray) -> Any:
    is_single = numbers.dtype == np.float32
    return Panels(
        numbers=numbers.view(np.uint32) if is_single else numbers,
        columns=layout.columns,
        shift=0 if is_single else 16,
        words=_words(panels, layout),
        bits=layout.bits,
        factor=factor,
    )


@jit
def _encode(team, call):
    split_work(team, call.words.shape[0], _quantize_panel, call)


@jit
def _decode(team, call):
    split_work(team, call.words.shape[0], _dequantize_panel, call)


@jit_function
def _place(column, bits):
    """The row of words that holds the codes of a column of a group, and the lowest bit of the codes in it."""
    in_word = column % (32 // bits)
    return column * bits // 32, np.uint32(in_word // 2 * bits + in_word % 2 * 16)


@jit_function
def _quantize_panel(panel, call):
    """Quantize the rows of a panel."""
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
            minimum_bits = _half_bits(least)
            minimum = _half(minimum_bits)
            steps = levels if call.bits > 4 else _steps(numbers[: end - start], least, most, levels)
            scale_bits = _half_bits(max(most - minimum, np.float32(0)) / steps)
            halves[lane], halves[LANES + lane] = scale_bits, minimum_bits
            for column in range(end - start):
                codes[column] = 0
            put_codes(numbers[: end - start], _half(scale_bits), minimum, levels, codes, np.uint32(0))
            for column in range(end - start):
                word, position = _place(column, call.bits)
                words[1 + word, lane] |= codes[column] << position


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
def _dequantize_panel(panel, call):
    """Dequantize the rows of a panel."""
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
def _dequantize_row(words, bits, factor, row, out):
    panel, lane = divmod(row, LANES)
    group, mask = (words.shape[2] - 1) * (32 // bits), np.uint32((1 << bits) - 1)
    for column in range(out.size):
        index = column // group
        word, position = _place(column - index * group, bits)
        code = np.float32((words[panel, index, 1 + word, lane] >> position) & mask)
        halves = words[panel, index, 0].view(np.uint16)
        scale, minimum = _half(np.uint32(halves[lane])), _half(np.uint32(halves[LANES + lane]))
        out[column] = np.float32(factor) * (minimum + scale * code)


def panel_kernels(element: np.dtype) -> list[Needed]:
    """The kernels that quantize weights of `element` and dequantize them."""
    of_row = uint32[:, :, :, ::1], int64, float64, int64, float32[::1]
    return [*((kernel, taking(Panels, element)) for kernel in (_encode, _decode)), (_dequantize_row, of_row)]
