"""
Products of a few tokens with weights in full precision, of which each token has chosen some.

Each thread reads whole rows, from the first to the last byte; where columns come before rows, a wide part of each
column. Tokens that share a weight are multiplied with what is read while it is in the cache. What nobody has chosen is
not read.
"""

from typing import Any, NamedTuple

import numpy as np

from .column_tiles import COLUMNS, add_columns
from .compiled import Needed, jit, jit_part, taking_numbers
from .experts import ExpertCall, adding_up_experts
from .numbers_at import Numbers, address_of, load_numbers, store_numbers
from .parallel import share_out, team_of_kernels
from .routing import Routing, multiplying_chosen, parts_of
from .row_tiles import ROW_TOKENS, STEP, multiply_row

_MOST_TOKENS = ROW_TOKENS[0]
# Outputs of a part where columns come before rows, so that what is read of a column is worth the way to it: better as
# many as these, and not less than those, so that all threads have a part.
_BEST_OUTPUTS, _LEAST_OUTPUTS = 2048, 512


class PlainWeights(NamedTuple):
    """
    Weights of one shape, one after the other: float32 or bfloat16 `[matrices, rows, columns]`, or `[matrices, columns,
    rows]`.

    Attributes:
        address: of the first.
        matrices: how many.
        rows: outputs.
        columns: inputs.
        is_transposed: columns come before rows.
    """

    address: int
    matrices: int
    rows: int
    columns: int
    is_transposed: bool = False


class Weights(NamedTuple):
    """What the kernel knows of weights."""

    numbers: Numbers
    matrices: int
    rows: int
    columns: int
    is_transposed: bool


class Product(NamedTuple):
    """One call of `_write_products`."""

    weights: Weights
    routing: Routing
    operand: Any  # float32 [places, columns], the tokens
    targets: Any  # int64 [places], where in `out`
    bias: Numbers  # [matrices, rows]; at 0 for none
    bias_step: int  # from the bias of one weight to that of the next
    out: Numbers  # [targets, rows]
    parts: int  # of each weight


def multiply_plain(
    weights: PlainWeights,
    chosen: int,
    num_pairs: int,
    tokens: int,
    pairs_of_token: int,
    is_bfloat16: bool,
    bias: int,
    out: int,
) -> int:
    """
    Write `token @ weight.T + bias` for pairs of a token and a weight, each token's one after the other.

    Args:
        weights: of which each token has chosen some.
        chosen: address of int64 `[num_pairs]`, the index of each pair's weight; that of the first beyond for none, and
            zeros are written.
        num_pairs: at least 1.
        tokens: address of contiguous `[num_pairs / pairs_of_token, columns]`, float32 or bfloat16.
        pairs_of_token: how many weights a token has chosen.
        is_bfloat16: the type of weights, tokens, biases and what is written.
        bias: address of `[matrices, rows]`; 0 for none.
        out: address of contiguous `[num_pairs, rows]`.

    Returns:
        How many indices are wrong; zeros are written for them, too.
    """
    given = (chosen, num_pairs, tokens, pairs_of_token, is_bfloat16, bias, out)
    return int(_multiply(*team_of_kernels(), *weights, *given))


def add_up_plain_experts(up: PlainWeights, down: PlainWeights, call: ExpertCall) -> int:
    """
    Write the weighted sums of what experts give.

    Args:
        up: their first weights, of the type of the tokens.
        down: their second weights, likewise.
        call: what for.

    Returns:
        How many indices are wrong; they count as none.
    """
    return int(_add_up_experts(*team_of_kernels(), *up, *down, *call))


@jit_part
def _write_products(parallel, team, threads, weights, routing, sources, tokens, targets, bias, bias_step, out):
    """Of tokens `sources`, in the places of a routing, to rows `targets` of `out`."""
    operand = np.empty((sources.size, weights.columns), np.float32)
    for place in range(sources.size):
        load_numbers(tokens, sources[place] * weights.columns, weights.columns, operand[place])
    num_bytes = weights.rows * weights.columns * (2 if weights.numbers.is_bfloat16 else 4)
    matrices = routing.matrices.size
    parts = parts_of(num_bytes, matrices, threads)
    if weights.is_transposed:
        needed = (threads + matrices - 1) // max(matrices, 1)
        wide = max(weights.rows // _BEST_OUTPUTS, min(needed, weights.rows // _LEAST_OUTPUTS), 1)
        parts = min(parts, wide)
    parts = min(parts, weights.rows)
    given = Product(weights, routing, operand, targets, bias, bias_step, out, parts)
    if weights.is_transposed:
        share_out(parallel, team, threads, parts * matrices, _multiply_columns, given)
    else:
        share_out(parallel, team, threads, parts * matrices, _multiply_rows, given)


@jit_part
def _multiply_rows(part, call):
    """The outputs of some rows of a weight, for all of its tokens."""
    weights, routing, operand = call.weights, call.routing, call.operand
    columns = weights.columns
    group, part = part // call.parts, part % call.parts
    matrix, end = routing.matrices[group], routing.starts[group + 1]
    first, last = part * weights.rows // call.parts, (part + 1) * weights.rows // call.parts
    sums = np.empty((end - routing.starts[group], last - first), np.float32)
    biases = np.zeros(last - first, np.float32)
    if call.bias.address:
        load_numbers(call.bias, matrix * call.bias_step + first, last - first, biases)
    scratch = np.zeros(_MOST_TOKENS, np.float32)
    steps = columns // STEP
    tail = np.empty(columns - steps * STEP, np.float32)
    stride = operand.shape[1] * 4
    for row in range(first, last):
        start = (matrix * weights.rows + row) * columns
        load_numbers(weights.numbers, start + steps * STEP, tail.size, tail)
        address = address_of(weights.numbers, start)
        place = routing.starts[group]
        while place < end:
            tokens = _MOST_TOKENS
            while tokens > end - place:
                tokens //= 2
            if steps:
                inputs = operand.ctypes.data + place * stride
                multiply_row(weights.numbers.is_bfloat16, tokens, address, steps, inputs, stride, scratch.ctypes.data)
            for index in range(tokens):
                total = scratch[index] + biases[row - first]
                for column in range(tail.size):
                    total += tail[column] * operand[place + index, steps * STEP + column]
                sums[place + index - routing.starts[group], row - first] = total
            place += tokens
    for place in range(routing.starts[group], end):
        start = call.targets[place] * weights.rows + first
        store_numbers(sums[place - routing.starts[group]], call.out, start, last - first)


@jit_part
def _multiply_columns(part, call):
    """The same where columns come before rows."""
    weights, routing, operand = call.weights, call.routing, call.operand
    group, part = part // call.parts, part % call.parts
    matrix, start, end = routing.matrices[group], routing.starts[group], routing.starts[group + 1]
    first, last = part * weights.rows // call.parts, (part + 1) * weights.rows // call.parts
    steps = (last - first) // STEP
    whole, together = steps * STEP, weights.columns // COLUMNS * COLUMNS
    sums = np.zeros((end - start, last - first), np.float32)
    if call.bias.address:
        for index in range(end - start):
            load_numbers(call.bias, matrix * call.bias_step + first, last - first, sums[index])
    left = np.empty(last - first, np.float32)
    column_bytes = weights.rows * (2 if weights.numbers.is_bfloat16 else 4)
    stride, sum_stride = operand.shape[1] * 4, sums.shape[1] * 4
    for column in range(weights.columns):
        at = (matrix * weights.columns + column) * weights.rows + first
        if steps and column < together and column % COLUMNS == 0:
            place = start
            while place < end:
                tokens = _MOST_TOKENS
                while tokens > end - place:
                    tokens //= 2
                add_columns(
                    weights.numbers.is_bfloat16,
                    tokens,
                    address_of(weights.numbers, at),
                    column_bytes,
                    steps,
                    operand.ctypes.data + place * stride + column * 4,
                    stride,
                    sums.ctypes.data + (place - start) * sum_stride,
                    sum_stride,
                )
                place += tokens
        # What does not fill a step, or four columns.
        done = whole if column < together else 0
        if done < last - first:
            load_numbers(weights.numbers, at + done, last - first - done, left)
            for index in range(end - start):
                number = operand[start + index, column]
                for output in range(done, last - first):
                    sums[index, output] += number * left[output - done]
    for place in range(start, end):
        store_numbers(sums[place - start], call.out, call.targets[place] * weights.rows + first, last - first)


_multiply_chosen, _add_up = multiplying_chosen(_write_products), adding_up_experts(_write_products)


@jit
def _multiply(
    parallel, team, threads, address, matrices, rows, columns, is_transposed,
    chosen, num_pairs, tokens, pairs_of_token, is_bfloat16, bias, out,
):  # fmt: skip
    weights = Weights(Numbers(address, is_bfloat16), matrices, rows, columns, is_transposed)
    return _multiply_chosen(
        parallel, team, threads, weights, chosen, 0, num_pairs, Numbers(tokens, is_bfloat16),
        pairs_of_token, Numbers(bias, is_bfloat16), rows, Numbers(out, is_bfloat16),
    )  # fmt: skip


@jit
def _add_up_experts(
    parallel, team, threads, up, matrices, up_rows, up_columns, is_transposed,
    down, _, down_rows, down_columns, is_down_transposed,
    chosen, num_pairs, tokens, pairs_of_token, is_bfloat16,
    shares, has_bfloat16_shares, up_bias, down_bias, out,
):  # fmt: skip
    call = ExpertCall(
        chosen, num_pairs, tokens, pairs_of_token, is_bfloat16, shares, has_bfloat16_shares, up_bias, down_bias, out
    )
    of_up = Weights(Numbers(up, is_bfloat16), matrices, up_rows, up_columns, is_transposed)
    of_down = Weights(Numbers(down, is_bfloat16), matrices, down_rows, down_columns, is_transposed)
    return _add_up(parallel, team, threads, of_up, of_down, call)


def plain_product_kernels() -> list[Needed]:
    """What multiplies with weights in full precision, and what adds up experts that have them."""
    return [(kernel, taking_numbers(kernel)) for kernel in (_multiply, _add_up_experts)]
