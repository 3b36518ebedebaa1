"""
Products of a few tokens with the weights in full precision that they have chosen.

Each thread reads whole rows, from the first to the last byte, or a wide part of each column if columns come before
rows. All tokens of a weight are multiplied with a row while it is in the cache. Weights that no token has chosen are
not read.
"""

from typing import Any, NamedTuple

import numpy as np

from ..vector.compiled import Needed, jit, jit_function, taking_numbers
from ..vector.numbers_at import Numbers, address_of, load_numbers, store_numbers
from ..vector.parallel import split_work, team_of_kernels, threads_of
from .column_tiles import COLUMNS, add_columns
from .experts import ExpertCall, adding_up_experts
from .routing import Routing, multiplying_chosen, parts_of
from .row_tiles import ROW_TOKENS, STEP, multiply_row

_MOST_TOKENS = ROW_TOKENS[0]
# Outputs of a part if columns come before rows. A column is read faster in parts of the best size; parts are smaller,
# down to the least size, if otherwise a thread would have none.
_BEST_OUTPUTS, _LEAST_OUTPUTS = 2048, 512


class PlainWeights(NamedTuple):
    """
    Weights of one shape, one after the other, in full precision.

    They are float32 or bfloat16 `[matrices, rows, columns]`, or `[matrices, columns, rows]`.

    Attributes:
        address: of the first weight.
        matrices: number of weights.
        rows: outputs of a weight.
        columns: inputs of a weight.
        is_transposed: whether columns come before rows in memory.
    """

    address: int
    matrices: int
    rows: int
    columns: int
    is_transposed: bool = False


class Weights(NamedTuple):
    """Weights as the kernel takes them."""

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
    targets: Any  # int64 [places], the row in `out`
    bias: Numbers  # [matrices, rows]; at 0 for none
    bias_step: int  # numbers from the bias of one weight to that of the next
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
    Write `token @ weight.T + bias` for pairs of a token and a weight; the pairs of a token follow each other.

    Args:
        weights: of which each token has chosen some.
        chosen: address of int64 `[num_pairs]`, the id of each pair's weight; the number of weights is the padding
            id, for which zeros are written.
        num_pairs: at least 1.
        tokens: address of contiguous `[num_pairs / pairs_of_token, columns]`, float32 or bfloat16.
        pairs_of_token: number of weights that a token has chosen.
        is_bfloat16: whether weights, tokens, biases and `out` are bfloat16, not float32.
        bias: address of `[matrices, rows]`; 0 for none.
        out: address of contiguous `[num_pairs, rows]`, written.

    Returns:
        The number of pairs with an invalid id; zeros are written for them, too.
    """
    wrong = _multiply(
        team_of_kernels().address,
        **weights._asdict(),
        chosen=chosen,
        num_pairs=num_pairs,
        tokens=tokens,
        pairs_of_token=pairs_of_token,
        is_bfloat16=is_bfloat16,
        bias=bias,
        out=out,
    )
    return int(wrong)


def add_up_plain_experts(up: PlainWeights, down: PlainWeights, call: ExpertCall) -> int:
    """
    Write the weighted sums of experts.

    Args:
        up: the first weights of the experts, of the type of the tokens.
        down: the second weights, of the type of the tokens.
        call: the other arguments.

    Returns:
        The number of pairs with an invalid id; they add nothing.
    """
    wrong = _add_up_experts(
        team_of_kernels().address,
        up=up.address,
        matrices=up.matrices,
        up_rows=up.rows,
        up_columns=up.columns,
        is_up_transposed=up.is_transposed,
        down=down.address,
        down_rows=down.rows,
        down_columns=down.columns,
        is_down_transposed=down.is_transposed,
        **call._asdict(),
    )
    return int(wrong)


@jit_function
def _write_products(team, weights, routing, sources, tokens, targets, bias, bias_step, out):
    """Write the products of the tokens `sources`, in the places of a routing, to the rows `targets` of `out`."""
    operand = np.empty((sources.size, weights.columns), np.float32)
    for place in range(sources.size):
        load_numbers(tokens, sources[place] * weights.columns, weights.columns, operand[place])
    num_bytes = weights.rows * weights.columns * (2 if weights.numbers.is_bfloat16 else 4)
    matrices = routing.matrices.size
    threads = threads_of(team)
    parts = parts_of(num_bytes, matrices, threads)
    if weights.is_transposed:
        needed = (threads + matrices - 1) // max(matrices, 1)
        wide = max(weights.rows // _BEST_OUTPUTS, min(needed, weights.rows // _LEAST_OUTPUTS), 1)
        parts = min(parts, wide)
    parts = min(parts, weights.rows)
    given = Product(
        weights=weights,
        routing=routing,
        operand=operand,
        targets=targets,
        bias=bias,
        bias_step=bias_step,
        out=out,
        parts=parts,
    )
    if weights.is_transposed:
        split_work(team, parts * matrices, _multiply_columns, given)
    else:
        split_work(team, parts * matrices, _multiply_rows, given)


@jit_function
def _multiply_rows(part, call):
    """Write the outputs of a part of a weight's rows, for all tokens of the weight."""
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


@jit_function
def _multiply_columns(part, call):
    """Do as `_multiply_rows` if columns come before rows."""
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
        # The outputs that do not fill a step, or all outputs of columns that do not fill four.
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
    team, address, matrices, rows, columns, is_transposed,
    chosen, num_pairs, tokens, pairs_of_token, is_bfloat16, bias, out,
):  # fmt: skip
    weights = Weights(
        numbers=Numbers(address, is_bfloat16),
        matrices=matrices,
        rows=rows,
        columns=columns,
        is_transposed=is_transposed,
    )
    return _multiply_chosen(
        team, weights, chosen, 0, num_pairs, Numbers(tokens, is_bfloat16),
        pairs_of_token, Numbers(bias, is_bfloat16), rows, Numbers(out, is_bfloat16),
    )  # fmt: skip


@jit
def _add_up_experts(
    team, up, matrices, up_rows, up_columns, is_up_transposed,
    down, down_rows, down_columns, is_down_transposed,
    chosen, num_pairs, tokens, choices, is_bfloat16,
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
    of_up = Weights(
        numbers=Numbers(up, is_bfloat16),
        matrices=matrices,
        rows=up_rows,
        columns=up_columns,
        is_transposed=is_up_transposed,
    )
    of_down = Weights(
        numbers=Numbers(down, is_bfloat16),
        matrices=matrices,
        rows=down_rows,
        columns=down_columns,
        is_transposed=is_down_transposed,
    )
    return _add_up(team, of_up, of_down, call)


def plain_product_kernels() -> list[Needed]:
    """The kernels that multiply with weights in full precision, and that compute experts with such weights."""
    return [(kernel, taking_numbers(kernel)) for kernel in (_multiply, _add_up_experts)]
