"""
Products of coded weights with a few tokens: `tokens @ weight.T`.

Each thread reads whole panels, from the first to the last byte. Tokens that share a panel are multiplied with it while
it is in the cache.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from .compiled import jit, jit_part
from .panel_tiles import TOKENS, multiply_panel
from .panels import PanelLayout
from .parallel import share_out, team_of_kernels
from .tiles import pointer
from .token_rounding import round_group
from .vector_ir import LANES

_MOST_TOKENS = TOKENS[0]
# What a thread takes at a time: little enough that all end at about the same time.
_PART_BYTES = 2**17


class Weight(NamedTuple):
    """What `_multiply` knows of a weight: integers, in this order in memory too."""

    address: int
    bits: int  # this and the others as of a `PanelLayout`
    rows: int
    columns: int
    groups: int
    group_words: int
    panels: int
    panel_bytes: int
    num_bytes: int


class Product(NamedTuple):
    """One call of `_multiply`; addresses, because making arrays of tensors takes longer than a small product."""

    weight: Weight
    factor: float
    tokens: int  # float32 or bfloat16 [num_tokens, columns]
    num_tokens: int
    is_bfloat16: bool  # tokens, bias and out
    parts: int
    bias: int  # [rows]; 0 for none
    out: int  # [num_tokens, rows]


class Operand(NamedTuple):
    """Tokens as integers, and what they are multiples of."""

    integers: Any  # int16 [num_tokens, groups * group]
    steps: Any  # float32 [num_tokens, groups]
    sums: Any  # float32 [num_tokens, groups], of a group, as rounded


class PanelProducts:
    """
    Products with coded weights of one layout.

    Args:
        panels: address of the first weight, `layout.num_bytes` before the next. Not kept alive here.
        layout: of each.
        factors: of each, see `factor_of`.
    """

    def __init__(self, panels: int, layout: PanelLayout, factors: Sequence[float]):
        fields = [getattr(layout, name) for name in Weight._fields[1:]]
        self._weights = np.array([Weight(panels + i * layout.num_bytes, *fields) for i in range(len(factors))])
        first, step = self._weights.ctypes.data, self._weights.itemsize * len(Weight._fields)
        # One address, because Numba takes a tuple of so many numbers in ten times the time.
        self._addresses = [first + index * step for index in range(len(factors))]
        self._factors = list(factors)

    def multiply(self, index: int, tokens: int, num_tokens: int, is_bfloat16: bool, bias: int, out: int) -> None:
        """
        Write `tokens @ weight.T + bias`.

        Args:
            index: of the weight.
            tokens: address of contiguous `[num_tokens, layout.columns]`, float32 or bfloat16.
            num_tokens: at least 1.
            is_bfloat16: the type of tokens, bias and what is written.
            bias: address of `[layout.rows]`; 0 for none.
            out: address of contiguous `[num_tokens, layout.rows]`.
        """
        weight, factor = self._addresses[index], self._factors[index]
        _multiply(*team_of_kernels(), weight, factor, tokens, num_tokens, is_bfloat16, bias, out)


@jit
def _multiply(parallel, team, threads, weight, factor, tokens, num_tokens, is_bfloat16, bias, out):
    fields = numba.carray(pointer(weight, np.int64(0)), 9)
    of = Weight(fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], fields[7], fields[8])
    parts = min(of.panels, max(threads, of.num_bytes // _PART_BYTES))
    call = Product(of, factor, tokens, num_tokens, is_bfloat16, parts, bias, out)
    group = of.group_words * (32 // of.bits)
    integers = np.empty((num_tokens, of.groups * group), np.int16)
    steps, sums = np.empty((num_tokens, of.groups), np.float32), np.empty((num_tokens, of.groups), np.float32)
    last = np.zeros(group, np.float32)
    item = 2 if is_bfloat16 else 4
    for token in range(num_tokens):
        for index in range(of.groups):
            first = token * of.columns + index * group
            place, is_half = tokens + first * item, is_bfloat16
            if (index + 1) * group > of.columns:
                _load(tokens, is_bfloat16, first, of.columns - index * group, last)
                place, is_half = last.ctypes.data, False
            number = token * of.groups + index
            round_group(
                place,
                is_half,
                group,
                integers.ctypes.data + number * group * 2,
                steps.ctypes.data + number * 4,
                sums.ctypes.data + number * 4,
            )
    share_out(parallel, team, threads, parts, _multiply_panels, (call, Operand(integers, steps, sums)))


@jit_part
def _load(address, is_bfloat16, first, count, numbers):
    if is_bfloat16:
        halves = numba.carray(pointer(address, np.uint16(0)), first + count)
        for index in range(count):
            numbers[index] = np.uint32(np.uint32(halves[first + index]) << np.uint32(16)).view(np.float32)
    else:
        singles = numba.carray(pointer(address, np.float32(0)), first + count)
        for index in range(count):
            numbers[index] = singles[first + index]


@jit_part
def _multiply_panels(part, given):
    """The outputs of some panels, for all tokens."""
    call, operand = given
    weight = call.weight
    scratch = np.empty((_MOST_TOKENS, LANES), np.float32)
    bias = np.zeros(LANES, np.float32)
    factor = np.float32(call.factor)
    stride, number_stride = operand.integers.shape[1] * 2, operand.steps.shape[1] * 4
    for panel in range(part * weight.panels // call.parts, (part + 1) * weight.panels // call.parts):
        row = panel * LANES
        rows = min(LANES, weight.rows - row)
        if call.bias:
            _load(call.bias, call.is_bfloat16, row, rows, bias)
        token = 0
        while token < call.num_tokens:
            tokens = _MOST_TOKENS
            while tokens > call.num_tokens - token:
                tokens //= 2
            multiply_panel(
                weight.bits,
                tokens,
                weight.address + panel * weight.panel_bytes,
                weight.groups,
                weight.group_words,
                operand.integers.ctypes.data + token * stride,
                stride,
                operand.steps.ctypes.data + token * number_stride,
                operand.sums.ctypes.data + token * number_stride,
                number_stride,
                scratch.ctypes.data,
            )
            for index in range(tokens):
                for lane in range(rows):
                    scratch[index, lane] = scratch[index, lane] * factor + bias[lane]
                _store(scratch[index], call.is_bfloat16, call.out, (token + index) * weight.rows + row, rows)
            token += tokens


@jit_part
def _store(numbers, is_bfloat16, address, first, count):
    if is_bfloat16:
        halves = numba.carray(pointer(address, np.uint16(0)), first + count)
        for index in range(count):
            bits = np.float32(numbers[index]).view(np.uint32)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            # Of what is not a number, rounding might make one.
            kept = rounded if numbers[index] == numbers[index] else bits | np.uint32(0x400000)
            halves[first + index] = np.uint16(kept >> np.uint32(16))
    else:
        singles = numba.carray(pointer(address, np.float32(0)), first + count)
        for index in range(count):
            singles[first + index] = numbers[index]
