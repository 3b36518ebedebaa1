"""
Products of a few tokens with weights in full precision, of which each token has chosen some.

Each thread reads whole rows, from the first to the last byte; tokens that share a weight are multiplied with a row
while it is in the cache. What nobody has chosen is not read.
"""

from typing import NamedTuple

import numpy as np

from .compiled import jit, jit_part
from .numbers_at import clear_numbers, load_numbers, store_numbers
from .parallel import share_out, team_of_kernels
from .routing import parts_of, routed
from .row_tiles import ROW_TOKENS, STEP, multiply_row

_MOST_TOKENS = ROW_TOKENS[0]


class RowWeights(NamedTuple):
    """
    Weights of one shape, one after the other: float32 or bfloat16 `[matrices, rows, columns]`.

    Attributes:
        address: of the first.
        matrices: how many.
        rows: outputs.
        columns: inputs.
    """

    address: int
    matrices: int
    rows: int
    columns: int


class Product(NamedTuple):
    """One call of `_multiply`."""

    weights: RowWeights
    is_bfloat16: bool  # weights, biases and out
    parts: int  # of each weight
    bias: int  # [matrices, rows]; 0 for none
    out: int  # [pairs, rows]


def multiply_rows(
    weights: RowWeights,
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


@jit
def _multiply(
    parallel, team, threads, address, matrices, rows, columns,
    chosen, num_pairs, tokens, pairs_of_token, is_bfloat16, bias, out,
):  # fmt: skip
    weights = RowWeights(address, matrices, rows, columns)
    routing = routed(chosen, num_pairs, matrices, 0)
    if routing.pairs.size > routing.starts[-1]:
        clear_numbers(is_bfloat16, out, num_pairs * rows)
    parts = min(rows, parts_of(rows * columns * (2 if is_bfloat16 else 4), routing.matrices.size, threads))
    operand = np.empty((num_pairs, columns), np.float32)
    for place in range(routing.starts[-1]):
        token = routing.pairs[place] // pairs_of_token
        load_numbers(tokens, is_bfloat16, token * columns, columns, operand[place])
    given = (Product(weights, is_bfloat16, parts, bias, out), operand, routing)
    share_out(parallel, team, threads, parts * routing.matrices.size, _multiply_part, given)
    return routing.wrong


@jit_part
def _multiply_part(part, given):
    """The outputs of some rows of a weight, for all of its tokens."""
    call, operand, routing = given
    weights = call.weights
    columns, row_bytes = weights.columns, weights.columns * (2 if call.is_bfloat16 else 4)
    group, part = part // call.parts, part % call.parts
    matrix, end = routing.matrices[group], routing.starts[group + 1]
    first, last = part * weights.rows // call.parts, (part + 1) * weights.rows // call.parts
    sums = np.empty((end - routing.starts[group], last - first), np.float32)
    biases = np.zeros(last - first, np.float32)
    if call.bias:
        load_numbers(call.bias, call.is_bfloat16, matrix * weights.rows + first, last - first, biases)
    scratch = np.zeros(_MOST_TOKENS, np.float32)
    steps = columns // STEP
    tail = np.empty(columns - steps * STEP, np.float32)
    stride = operand.shape[1] * 4
    for row in range(first, last):
        address = weights.address + (matrix * weights.rows + row) * row_bytes
        load_numbers(address, call.is_bfloat16, steps * STEP, tail.size, tail)
        place = routing.starts[group]
        while place < end:
            tokens = _MOST_TOKENS
            while tokens > end - place:
                tokens //= 2
            if steps:
                inputs = operand.ctypes.data + place * stride
                multiply_row(call.is_bfloat16, tokens, address, steps, inputs, stride, scratch.ctypes.data)
            for index in range(tokens):
                total = scratch[index] + biases[row - first]
                for column in range(tail.size):
                    total += tail[column] * operand[place + index, steps * STEP + column]
                sums[place + index - routing.starts[group], row - first] = total
            place += tokens
    for place in range(routing.starts[group], end):
        start = routing.pairs[place] * weights.rows + first
        store_numbers(sums[place - routing.starts[group]], call.is_bfloat16, call.out, start, last - first)
