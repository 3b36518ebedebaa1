"""
Products of coded weights with a few tokens: `tokens @ weight.T`.

Each thread reads whole panels, from the first to the last byte. Tokens that share a panel are multiplied with it while
it is in the cache. Of several weights of one shape only those are read that a token has chosen, all in one call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from .compiled import Needed, jit, jit_inlined, jit_part, taking_numbers
from .experts import ExpertCall, adding_up_experts
from .numbers_at import Numbers, address_of, load_numbers, store_numbers, store_sixteen
from .panel_tiles import SQUARE, SQUARE_BITS, TOKENS, multiply_panels
from .panels import PanelLayout
from .parallel import share_out, team_of_kernels
from .routing import Routing, multiplying_chosen, parts_of
from .tiles import pointer
from .token_rounding import round_group
from .vector_ir import LANES

_MOST_TOKENS = TOKENS[0]
_PANELS, _SQUARE_TOKENS = SQUARE
# Numbers of tokens that a thread rounds at a time.
_ROUNDED_NUMBERS = 2**15


class Weights(NamedTuple):
    """What the kernel knows of weights: integers, in this order in memory too."""

    address: int  # of the first
    matrices: int
    factors: int  # address of float64 [matrices]
    bits: int  # this and the others as of a `PanelLayout`
    rows: int
    columns: int
    groups: int
    group_words: int
    panels: int
    panel_bytes: int
    num_bytes: int


class Product(NamedTuple):
    """One call of `_write_products`; addresses, because making arrays of tensors takes longer than a small product."""

    weights: Weights
    routing: Routing
    sources: Any  # int64 [places], which token
    tokens: Numbers  # [tokens, columns]
    targets: Any  # int64 [places], where in `out`
    bias: Numbers  # [matrices, rows], or [rows] for one weight; at 0 for none
    bias_step: int  # from the bias of one weight to that of the next
    out: Numbers  # [targets, rows]
    parts: int  # of each weight


class Operand(NamedTuple):
    """Tokens as integers, and what they are multiples of, in the places of their pairs."""

    integers: Any  # int16 [places, groups * group], or as many pairs of digits
    steps: Any  # float32 [places, groups]
    sums: Any  # float32 [places, groups], of a group, as rounded
    parts: int  # that are rounded at a time


class Matrix(NamedTuple):
    """One of the weights, and what a thread needs beside it."""

    address: int
    factor: Any  # float32, of the weight
    bias: Any  # float32 [_PANELS, LANES], of the panels at hand, by the rest of their index
    scratch: Any  # float32 [tokens * panels, LANES]


class PanelProducts:
    """
    Products with coded weights of one layout.

    Args:
        panels: address of the first weight, `layout.num_bytes` before the next. Not kept alive here.
        layout: of each.
        factors: of each, see `factor_of`.
    """

    def __init__(self, panels: int, layout: PanelLayout, factors: Sequence[float]):
        self._factors = np.array(factors, np.float64)
        fields = [getattr(layout, name) for name in Weights._fields[3:]]
        self._weights = np.array(Weights(panels, len(factors), self._factors.ctypes.data, *fields))
        # An address, because Numba takes a tuple of so many numbers in ten times the time.
        self._at = self._weights.ctypes.data
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
        _multiply(*team_of_kernels(), self._at, 0, index, num_tokens, tokens, 1, is_bfloat16, bias, 0, out)

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
        given = (chosen, 0, num_pairs, tokens, pairs_of_token, is_bfloat16, bias, self._rows, out)
        return int(_multiply(*team_of_kernels(), self._at, *given))

    def add_up_experts(self, down: "PanelProducts", call: ExpertCall) -> int:
        """
        Write the weighted sums of what experts give whose first weights these are.

        Args:
            down: their second weights.
            call: what for.

        Returns:
            How many indices are wrong; they count as none.
        """
        return int(_add_up_experts(*team_of_kernels(), self._at, down._at, *call))


@jit_part
def _weights_at(address):
    fields = numba.carray(pointer(address, np.int64(0)), 11)
    return Weights(
        fields[0], fields[1], fields[2], fields[3], fields[4], fields[5],
        fields[6], fields[7], fields[8], fields[9], fields[10],
    )  # fmt: skip


@jit_part
def _write_products(parallel, team, threads, weights, routing, sources, tokens, targets, bias, bias_step, out):
    """Of tokens `sources`, in the places of a routing, to rows `targets` of `out`."""
    places = routing.starts[-1]
    parts = min(weights.panels, parts_of(weights.num_bytes, routing.matrices.size, threads))
    call = Product(weights, routing, sources, tokens, targets, bias, bias_step, out, parts)
    columns = weights.groups * weights.group_words * (32 // weights.bits)
    operand = Operand(
        np.empty((places, columns), np.int16),
        np.empty((places, weights.groups), np.float32),
        np.empty((places, weights.groups), np.float32),
        max(1, min(places, places * columns // _ROUNDED_NUMBERS)),
    )
    share_out(parallel, team, threads, operand.parts, _round_tokens, (call, operand))
    share_out(parallel, team, threads, parts * routing.matrices.size, _multiply_part, (call, operand))


@jit_part
def _round_tokens(part, given):
    """Those in some places."""
    call, operand = given
    weights = call.weights
    group = weights.group_words * (32 // weights.bits)
    last = np.zeros(group, np.float32)
    places = call.sources.size
    for place in range(part * places // operand.parts, (part + 1) * places // operand.parts):
        for index in range(weights.groups):
            first = call.sources[place] * weights.columns + index * group
            address, is_bfloat16 = address_of(call.tokens, first), call.tokens.is_bfloat16
            if (index + 1) * group > weights.columns:
                load_numbers(call.tokens, first, weights.columns - index * group, last)
                address, is_bfloat16 = last.ctypes.data, False
            number = place * weights.groups + index
            round_group(
                weights.bits,
                address,
                is_bfloat16,
                group,
                operand.integers.ctypes.data + number * group * 2,
                operand.steps.ctypes.data + number * 4,
                operand.sums.ctypes.data + number * 4,
            )


@jit_part
def _multiply_part(part, given):
    """The outputs of some panels of a weight, for all of its tokens."""
    call, operand = given
    weights, routing = call.weights, call.routing
    group, part = part // call.parts, part % call.parts
    matrix, end = routing.matrices[group], routing.starts[group + 1]
    factor = np.float32(numba.carray(pointer(weights.factors, np.float64(0)), matrix + 1)[matrix])
    address = weights.address + matrix * weights.num_bytes
    bias = np.zeros((_PANELS, LANES), np.float32)
    scratch = np.empty((_MOST_TOKENS * _PANELS, LANES), np.float32)
    of_matrix = Matrix(address, factor, bias, scratch)
    last = (part + 1) * weights.panels // call.parts
    # With fewer tokens a panel is read once; side by side, two would come from memory later.
    is_square = weights.bits == SQUARE_BITS and end - routing.starts[group] > _MOST_TOKENS
    for panel in range(part * weights.panels // call.parts, last, _PANELS):
        panels = min(_PANELS, last - panel)
        if call.bias.address:
            for index in range(panels):
                row = (panel + index) * LANES
                rows = min(LANES, weights.rows - row)
                load_numbers(call.bias, matrix * call.bias_step + row, rows, bias[(panel + index) % _PANELS])
        place = routing.starts[group]
        while place < end:
            if is_square and panels == _PANELS and end - place >= _SQUARE_TOKENS:
                _write_tile(call, operand, of_matrix, panel, _PANELS, place, _SQUARE_TOKENS)
                place += _SQUARE_TOKENS
                continue
            tokens = _MOST_TOKENS
            while tokens > end - place:
                tokens //= 2
            for index in range(panels):
                _write_tile(call, operand, of_matrix, panel + index, 1, place, tokens)
            place += tokens


@jit_inlined
def _write_tile(call, operand, of_matrix, panel, panels, place, tokens):
    """The outputs of a tile."""
    weights = call.weights
    stride, number_stride = operand.integers.shape[1] * 2, operand.steps.shape[1] * 4
    multiply_panels(
        weights.bits,
        panels,
        tokens,
        of_matrix.address + panel * weights.panel_bytes,
        weights.panel_bytes,
        weights.groups,
        weights.group_words,
        operand.integers.ctypes.data + place * stride,
        stride,
        operand.steps.ctypes.data + place * number_stride,
        operand.sums.ctypes.data + place * number_stride,
        number_stride,
        of_matrix.scratch.ctypes.data,
    )
    for index in range(tokens):
        for which in range(panels):
            row = (panel + which) * LANES
            rows = min(LANES, weights.rows - row)
            output, bias = of_matrix.scratch[index * panels + which], of_matrix.bias[(panel + which) % _PANELS]
            target = call.targets[place + index] * weights.rows + row
            if rows == LANES:
                at = address_of(call.out, target)
                store_sixteen(output.ctypes.data, of_matrix.factor, bias.ctypes.data, call.out.is_bfloat16, at)
            else:
                store_sixteen(output.ctypes.data, of_matrix.factor, bias.ctypes.data, False, output.ctypes.data)
                store_numbers(output, call.out, target, rows)


_multiply_chosen, _add_up = multiplying_chosen(_write_products), adding_up_experts(_write_products)


@jit
def _multiply(
    parallel, team, threads, weights, chosen, only, num_pairs,
    tokens, pairs_of_token, is_bfloat16, bias, bias_step, out,
):  # fmt: skip
    return _multiply_chosen(
        parallel, team, threads, _weights_at(weights), chosen, only, num_pairs, Numbers(tokens, is_bfloat16),
        pairs_of_token, Numbers(bias, is_bfloat16), bias_step, Numbers(out, is_bfloat16),
    )  # fmt: skip


@jit
def _add_up_experts(
    parallel, team, threads, up, down, chosen, num_pairs, tokens, pairs_of_token, is_bfloat16,
    shares, has_bfloat16_shares, up_bias, down_bias, out,
):  # fmt: skip
    call = ExpertCall(
        chosen, num_pairs, tokens, pairs_of_token, is_bfloat16, shares, has_bfloat16_shares, up_bias, down_bias, out
    )
    return _add_up(parallel, team, threads, _weights_at(up), _weights_at(down), call)


def panel_product_kernels() -> list[Needed]:
    """What multiplies with weights of few bits, and what adds up experts that have them."""
    return [(kernel, taking_numbers(kernel)) for kernel in (_multiply, _add_up_experts)]
