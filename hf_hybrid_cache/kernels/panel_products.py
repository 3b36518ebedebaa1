"""
Products of coded weights with a few tokens: `tokens @ weight.T`.

Each thread reads whole panels, from the first to the last byte. Tokens that share a panel are multiplied with it while
it is in the cache.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from .compiled import jit, jit_part
from .panel_tiles import TOKENS, multiply_panel
from .panels import PanelLayout
from .parallel import openmp, share_out, started_threads
from .threads import get_num_threads
from .tiles import pointer
from .vector_ir import LANES

_MOST_TOKENS = TOKENS[0]
_LARGEST = np.float32(32767)
# Smaller numbers are nothing beside anything a model computes, and their reciprocal would overflow.
_NEGLIGIBLE = np.float32(1e-30)
# What a thread takes at a time: little enough that all end at about the same time.
_PART_BYTES = 2**17


class Product(NamedTuple):
    """One call of `_multiply`; addresses, because making arrays of tensors takes longer than a small product."""

    tokens: int  # float32 or bfloat16 [num_tokens, columns]
    num_tokens: int
    is_bfloat16: bool  # tokens, bias and out
    panels: int  # see `panels`
    factor: float
    bits: int
    rows: int
    columns: int
    groups: int
    group_words: int
    panel_bytes: int
    parts: int
    bias: int  # [rows]; 0 for none
    out: int  # [num_tokens, rows]


class Operand(NamedTuple):
    """Tokens as integers, and what they are multiples of."""

    integers: Any  # int16 [num_tokens, groups * group]
    steps: Any  # float32 [num_tokens, groups]
    sums: Any  # float32 [num_tokens, groups], of a group, as rounded


def multiply(
    tokens: int,
    num_tokens: int,
    is_bfloat16: bool,
    panels: int,
    layout: PanelLayout,
    factor: float,
    bias: int,
    out: int,
) -> None:
    """
    Write `tokens @ weight.T + bias`.

    Args:
        tokens: address of contiguous `[num_tokens, layout.columns]`, float32 or bfloat16.
        num_tokens: at least 1.
        is_bfloat16: the type of tokens, bias and what is written.
        panels: address of the weight, `layout.num_bytes`.
        layout: of the weight.
        factor: likewise.
        bias: address of `[layout.rows]`; 0 for none.
        out: address of contiguous `[num_tokens, layout.rows]`.
    """
    threads = get_num_threads()
    pool = openmp() or started_threads()
    parts = min(layout.panels, max(threads, layout.num_bytes // _PART_BYTES))
    call = Product(
        tokens,
        num_tokens,
        is_bfloat16,
        panels,
        factor,
        layout.bits,
        layout.rows,
        layout.columns,
        layout.groups,
        layout.group_words,
        layout.panel_bytes,
        parts,
        bias,
        out,
    )
    _multiply(pool.parallel, max(threads, pool.team()), threads, call)


@jit
def _multiply(parallel, team, threads, call):
    group = call.group_words * (32 // call.bits)
    operand = Operand(
        np.empty((call.num_tokens, call.groups * group), np.int16),
        np.empty((call.num_tokens, call.groups), np.float32),
        np.empty((call.num_tokens, call.groups), np.float32),
    )
    numbers = np.empty(group, np.float32)
    for token in range(call.num_tokens):
        for index in range(call.groups):
            start = index * group
            first = token * call.columns + start
            filled = min(group, call.columns - start)
            _load(call.tokens, call.is_bfloat16, first, filled, numbers)
            for column in range(filled, group):
                numbers[column] = 0
            largest = total = np.float32(0)
            for column in range(group):
                total += numbers[column]
            for column in range(group):
                size = abs(numbers[column])
                largest = size if size > largest else largest
            factor = _LARGEST / largest if largest > _NEGLIGIBLE else np.float32(0)
            # The sum of what is multiplied, not of what it stands for: then errors count by weights, not by codes.
            rounded = 0
            for column in range(group):
                integer = np.int16(np.rint(numbers[column] * factor))
                operand.integers[token, start + column] = integer
                rounded += integer
            step = largest / _LARGEST if abs(total) < np.inf else np.float32(np.nan)
            operand.steps[token, index], operand.sums[token, index] = step, step * np.float32(rounded)
    share_out(parallel, team, threads, call.parts, _multiply_panels, (call, operand))


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
    panels = (call.rows + LANES - 1) // LANES
    scratch = np.empty((_MOST_TOKENS, LANES), np.float32)
    bias = np.zeros(LANES, np.float32)
    factor = np.float32(call.factor)
    stride, number_stride = operand.integers.shape[1] * 2, operand.steps.shape[1] * 4
    for panel in range(part * panels // call.parts, (part + 1) * panels // call.parts):
        row = panel * LANES
        rows = min(LANES, call.rows - row)
        if call.bias:
            _load(call.bias, call.is_bfloat16, row, rows, bias)
        token = 0
        while token < call.num_tokens:
            tokens = _MOST_TOKENS
            while tokens > call.num_tokens - token:
                tokens //= 2
            multiply_panel(
                call.bits,
                tokens,
                call.panels + panel * call.panel_bytes,
                call.groups,
                call.group_words,
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
                _store(scratch[index], call.is_bfloat16, call.out, (token + index) * call.rows + row, rows)
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
