"""
Products of coded weights with a few tokens: `tokens @ weight.T`.

Each thread reads whole panels, from the first to the last byte. Tokens that share a panel are multiplied with it while
it is in the cache. Of several weights of one shape only those are read that a token has chosen, all in one call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from .compiled import jit, jit_part
from .numbers_at import clear_numbers, load_numbers, store_numbers
from .panel_tiles import TOKENS, multiply_panel
from .panels import PanelLayout
from .parallel import share_out, team_of_kernels
from .routing import parts_of, routed
from .tiles import pointer
from .token_rounding import round_group
from .vector_ir import LANES

_MOST_TOKENS = TOKENS[0]


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

    weight: Weight  # the first of them
    factors: int  # float64 [matrices]
    tokens: int  # float32 or bfloat16 [pairs / pairs_of_token, columns]
    pairs_of_token: int
    is_bfloat16: bool  # tokens, bias and out
    parts: int  # of each weight
    bias: int  # [matrices, rows], or [rows] for one weight; 0 for none
    bias_step: int  # from the bias of one weight to that of the next
    out: int  # [pairs, rows]


class Operand(NamedTuple):
    """Tokens as integers, and what they are multiples of, in the places of their pairs."""

    integers: Any  # int16 [pairs, groups * group], or as many pairs of digits
    steps: Any  # float32 [pairs, groups]
    sums: Any  # float32 [pairs, groups], of a group, as rounded


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
        self._weight, self._factors = np.array(Weight(panels, *fields)), np.array(factors, np.float64)
        # Addresses, because Numba takes a tuple of so many numbers in ten times the time.
        self._of = self._weight.ctypes.data, len(factors), self._factors.ctypes.data
        self._rows = layout.rows

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
        _multiply(*team_of_kernels(), *self._of, 0, index, tokens, num_tokens, 1, is_bfloat16, bias, 0, out)

    def multiply_chosen(
        self, chosen: int, num_pairs: int, tokens: int, pairs_of_token: int, is_bfloat16: bool, bias: int, out: int
    ) -> int:
        """
        Write `token @ weight.T + bias` for pairs of a token and a weight, each token's one after the other.

        Args:
            chosen: address of int64 `[num_pairs]`, the index of each pair's weight; that of the first beyond for none,
                and zeros are written.
            num_pairs: at least 1.
            tokens: address of contiguous `[num_pairs / pairs_of_token, layout.columns]`, float32 or bfloat16.
            pairs_of_token: how many weights a token has chosen.
            is_bfloat16: the type of tokens, biases and what is written.
            bias: address of `[weights, layout.rows]`; 0 for none.
            out: address of contiguous `[num_pairs, layout.rows]`.

        Returns:
            How many indices are wrong; zeros are written for them, too.
        """
        given = (tokens, num_pairs, pairs_of_token, is_bfloat16, bias, self._rows, out)
        return int(_multiply(*team_of_kernels(), *self._of, chosen, 0, *given))


@jit
def _multiply(
    parallel, team, threads, weight, matrices, factors, chosen, only,
    tokens, num_pairs, pairs_of_token, is_bfloat16, bias, bias_step, out,
):  # fmt: skip
    fields = numba.carray(pointer(weight, np.int64(0)), 9)
    of = Weight(fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], fields[7], fields[8])
    routing = routed(chosen, num_pairs, matrices, only)
    if routing.pairs.size > routing.starts[-1]:
        clear_numbers(is_bfloat16, out, num_pairs * of.rows)
    parts = min(of.panels, parts_of(of.num_bytes, routing.matrices.size, threads))
    call = Product(of, factors, tokens, pairs_of_token, is_bfloat16, parts, bias, bias_step, out)
    group = of.group_words * (32 // of.bits)
    integers = np.empty((num_pairs, of.groups * group), np.int16)
    steps, sums = np.empty((num_pairs, of.groups), np.float32), np.empty((num_pairs, of.groups), np.float32)
    last = np.zeros(group, np.float32)
    item = 2 if is_bfloat16 else 4
    for place in range(routing.starts[-1]):
        token = routing.pairs[place] // pairs_of_token
        for index in range(of.groups):
            first = token * of.columns + index * group
            address, is_half = tokens + first * item, is_bfloat16
            if (index + 1) * group > of.columns:
                load_numbers(tokens, is_bfloat16, first, of.columns - index * group, last)
                address, is_half = last.ctypes.data, False
            number = place * of.groups + index
            round_group(
                of.bits,
                address,
                is_half,
                group,
                integers.ctypes.data + number * group * 2,
                steps.ctypes.data + number * 4,
                sums.ctypes.data + number * 4,
            )
    given = (call, Operand(integers, steps, sums), routing)
    share_out(parallel, team, threads, parts * routing.matrices.size, _multiply_panels, given)
    return routing.wrong


@jit_part
def _multiply_panels(part, given):
    """The outputs of some panels of a weight, for all of its tokens."""
    call, operand, routing = given
    weight = call.weight
    scratch = np.empty((_MOST_TOKENS, LANES), np.float32)
    bias = np.zeros(LANES, np.float32)
    group, part = part // call.parts, part % call.parts
    matrix, end = routing.matrices[group], routing.starts[group + 1]
    factor = np.float32(numba.carray(pointer(call.factors, np.float64(0)), matrix + 1)[matrix])
    panels = weight.address + matrix * weight.num_bytes
    stride, number_stride = operand.integers.shape[1] * 2, operand.steps.shape[1] * 4
    for panel in range(part * weight.panels // call.parts, (part + 1) * weight.panels // call.parts):
        row = panel * LANES
        rows = min(LANES, weight.rows - row)
        if call.bias:
            load_numbers(call.bias, call.is_bfloat16, matrix * call.bias_step + row, rows, bias)
        place = routing.starts[group]
        while place < end:
            tokens = _MOST_TOKENS
            while tokens > end - place:
                tokens //= 2
            multiply_panel(
                weight.bits,
                tokens,
                panels + panel * weight.panel_bytes,
                weight.groups,
                weight.group_words,
                operand.integers.ctypes.data + place * stride,
                stride,
                operand.steps.ctypes.data + place * number_stride,
                operand.sums.ctypes.data + place * number_stride,
                number_stride,
                scratch.ctypes.data,
            )
            for index in range(tokens):
                for lane in range(rows):
                    scratch[index, lane] = scratch[index, lane] * factor + bias[lane]
                first = routing.pairs[place + index] * weight.rows + row
                store_numbers(scratch[index], call.is_bfloat16, call.out, first, rows)
            place += tokens
