"""
Products of quantized weights with a few tokens: `tokens @ weight.T`.

Each thread reads whole panels, from the first to the last byte. All tokens of a panel are multiplied with it while it
is in the cache. One call multiplies with several weights of one shape, and reads only those that a token has chosen.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from ..vector.compiled import Needed, jit, jit_function, jit_inlined, taking_numbers
from ..vector.numbers_at import Numbers, address_of, load_numbers, store_numbers, store_sixteen
from ..vector.parallel import split_work, team_of_kernels, threads_of
from ..vector.tiles import pointer
from ..vector.vector_ir import LANES
from .experts import ExpertCall, adding_up_experts
from .panel_tiles import SQUARE, SQUARE_BITS, TOKENS, multiply_panels
from .panels import PanelLayout
from .routing import Routing, multiplying_chosen, parts_of
from .token_rounding import round_group

_MOST_TOKENS = TOKENS[0]
_PANELS, _SQUARE_TOKENS = SQUARE
# Numbers that a thread rounds at a time.
_ROUNDED_NUMBERS = 2**15


class Weights(NamedTuple):
    """Weights as the kernel takes them: an array of int64 with the fields in this order."""

    address: int  # of the first matrix
    matrices: int
    factors: int  # address of float64 [matrices]
    bits: int  # this and the following fields are those of `PanelLayout`
    rows: int
    columns: int
    groups: int
    group_words: int
    panels: int
    panel_bytes: int
    num_bytes: int


class Product(NamedTuple):
    """One call of `_write_products`."""

    weights: Weights
    routing: Routing
    sources: Any  # int64 [places], the index of the token
    tokens: Numbers  # [tokens, columns]
    targets: Any  # int64 [places], the row in `out`
    bias: Numbers  # [matrices, rows], or [rows] for one weight; at 0 for none
    bias_step: int  # numbers from the bias of one matrix to that of the next
    out: Numbers  # [targets, rows]
    parts: int  # of each matrix


class Operand(NamedTuple):
    """Tokens rounded to integers, in the places of their pairs."""

    integers: Any  # int16 [places, groups * group], or as many pairs of digits
    steps: Any  # float32 [places, groups], which integers are multiples of
    sums: Any  # float32 [places, groups], sums of the rounded numbers
    parts: int  # in which threads round tokens


class Matrix(NamedTuple):
    """One of the weights, and the scratch memory of a thread."""

    address: int
    factor: Any  # float32, of the weight
    bias: Any  # float32 [_PANELS, LANES], bias of the current panels, by panel % _PANELS
    scratch: Any  # float32 [tokens * panels, LANES]


class PanelProducts:
    """
    Products with quantized weights of one layout.

    Args:
        panels: address of the first weight, `layout.num_bytes` before the next. The caller keeps the memory alive.
        layout: of each weight.
        factors: of each weight, see `factor_of`.
    """

    def __init__(self, panels: int, layout: PanelLayout, factors: Sequence[float]):
        self._factors = np.array(factors, np.float64)
        weights = Weights(
            address=panels,
            matrices=len(factors),
            factors=self._factors.ctypes.data,
            bits=layout.bits,
            rows=layout.rows,
            columns=layout.columns,
            groups=layout.groups,
            group_words=layout.group_words,
            panels=layout.panels,
            panel_bytes=layout.panel_bytes,
            num_bytes=layout.num_bytes,
        )
        self._weights = np.array(weights)
        # The kernel takes an address: Numba needs ten times as long for a tuple of so many numbers.
        self._at = self._weights.ctypes.data
        self._rows = layout.rows

    def multiply(self, index: int, tokens: int, num_tokens: int, is_bfloat16: bool, bias: int, out: int) -> None:
        """
        Write `tokens @ weight.T + bias`.

        Args:
            index: of the weight.
            tokens: address of contiguous `[num_tokens, layout.columns]`, float32 or bfloat16.
            num_tokens: at least 1.
            is_bfloat16: whether tokens, bias and `out` are bfloat16, not float32.
            bias: address of `[layout.rows]`; 0 for none.
            out: address of contiguous `[num_tokens, layout.rows]`, written.
        """
        _multiply(
            team_of_kernels().address,
            weights=self._at,
            chosen=0,
            only=index,
            num_pairs=num_tokens,
            tokens=tokens,
            pairs_of_token=1,
            is_bfloat16=is_bfloat16,
            bias=bias,
            bias_step=0,
            out=out,
        )

    def multiply_chosen(
        self, chosen: int, num_pairs: int, tokens: int, pairs_of_token: int, is_bfloat16: bool, bias: int, out: int
    ) -> int:
        """
        Write `token @ weight.T + bias` for pairs of a token and a weight; the pairs of a token follow each other.

        Args:
            chosen: address of int64 `[num_pairs]`, the id of each pair's weight; the number of weights is the padding
                id, for which zeros are written.
            num_pairs: at least 1.
            tokens: address of contiguous `[num_pairs / pairs_of_token, layout.columns]`, float32 or bfloat16.
            pairs_of_token: number of weights that a token has chosen.
            is_bfloat16: whether tokens, biases and `out` are bfloat16, not float32.
            bias: address of `[weights, layout.rows]`; 0 for none.
            out: address of contiguous `[num_pairs, layout.rows]`, written.

        Returns:
            The number of pairs with an invalid id; zeros are written for them, too.
        """
        wrong = _multiply(
            team_of_kernels().address,
            weights=self._at,
            chosen=chosen,
            only=0,
            num_pairs=num_pairs,
            tokens=tokens,
            pairs_of_token=pairs_of_token,
            is_bfloat16=is_bfloat16,
            bias=bias,
            bias_step=self._rows,
            out=out,
        )
        return int(wrong)

    def add_up_experts(self, down: "PanelProducts", call: ExpertCall) -> int:
        """
        Write the weighted sums of experts; these are the first weights of the experts.

        Args:
            down: the second weights of the experts.
            call: the other arguments.

        Returns:
            The number of pairs with an invalid id; they add nothing.
        """
        return int(_add_up_experts(team_of_kernels().address, up=self._at, down=down._at, **call._asdict()))


@jit_function
def _weights_at(address):
    # In the order of the fields, as the array is written.
    fields = numba.carray(pointer(address, np.int64(0)), 11)
    return Weights(
        fields[0], fields[1], fields[2], fields[3], fields[4], fields[5],
        fields[6], fields[7], fields[8], fields[9], fields[10],
    )  # fmt: skip


@jit_function
def _write_products(team, weights, routing, sources, tokens, targets, bias, bias_step, out):
    """Write the products of the tokens `sources`, in the places of a routing, to the rows `targets` of `out`."""
    places = routing.starts[-1]
    parts = min(weights.panels, parts_of(weights.num_bytes, routing.matrices.size, threads_of(team)))
    call = Product(
        weights=weights,
        routing=routing,
        sources=sources,
        tokens=tokens,
        targets=targets,
        bias=bias,
        bias_step=bias_step,
        out=out,
        parts=parts,
    )
    columns = weights.groups * weights.group_words * (32 // weights.bits)
    operand = Operand(
        integers=np.empty((places, columns), np.int16),
        steps=np.empty((places, weights.groups), np.float32),
        sums=np.empty((places, weights.groups), np.float32),
        parts=max(1, min(places, places * columns // _ROUNDED_NUMBERS)),
    )
    split_work(team, operand.parts, _round_tokens, (call, operand))
    split_work(team, parts * routing.matrices.size, _multiply_part, (call, operand))


@jit_function
def _round_tokens(part, given):
    """Round the tokens in a part of the places."""
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


@jit_function
def _multiply_part(part, given):
    """Write the outputs of a part of a weight's panels, for all tokens of the weight."""
    call, operand = given
    weights, routing = call.weights, call.routing
    group, part = part // call.parts, part % call.parts
    matrix, end = routing.matrices[group], routing.starts[group + 1]
    factor = np.float32(numba.carray(pointer(weights.factors, np.float64(0)), matrix + 1)[matrix])
    address = weights.address + matrix * weights.num_bytes
    bias = np.zeros((_PANELS, LANES), np.float32)
    scratch = np.empty((_MOST_TOKENS * _PANELS, LANES), np.float32)
    of_matrix = Matrix(address=address, factor=factor, bias=bias, scratch=scratch)
    last = (part + 1) * weights.panels // call.parts
    # With fewer tokens a panel is read once, and two panels at once would come from memory later.
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
    """Write the outputs of a tile."""
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
    team, weights, chosen, only, num_pairs,
    tokens, pairs_of_token, is_bfloat16, bias, bias_step, out,
):  # fmt: skip
    return _multiply_chosen(
        team, _weights_at(weights), chosen, only, num_pairs, Numbers(tokens, is_bfloat16),
        pairs_of_token, Numbers(bias, is_bfloat16), bias_step, Numbers(out, is_bfloat16),
    )  # fmt: skip


@jit
def _add_up_experts(
    team, up, down, chosen, num_pairs, tokens, choices, is_bfloat16,
    router_weights, has_bfloat16_router_weights, up_bias, down_bias, out,
):  # fmt: skip
    call = ExpertCall(
        chosen=chosen,
        num_pairs=num_pairs,
        tokens=tokens,
        choices=choices,
        is_bfloat16=is_bfloat16,
        router_weights=router_weights,
        has_bfloat16_router_weights=has_bfloat16_router_weights,
        up_bias=up_bias,
        down_bias=down_bias,
        out=out,
    )
    return _add_up(team, _weights_at(up), _weights_at(down), call)


def panel_product_kernels() -> list[Needed]:
    """The kernels that multiply with quantized weights, and that compute experts with such weights."""
    return [(kernel, taking_numbers(kernel)) for kernel in (_multiply, _add_up_experts)]
