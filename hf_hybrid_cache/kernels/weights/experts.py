"""
The gated experts of a layer in one call.

It makes two products, the gate between them, and the weighted sum of a token's choices. All between them is float32.
"""

from array import array
from typing import NamedTuple

import numpy as np

from ..vector.compiled import Needed, jit, jit_function, taking_numbers
from ..vector.intrinsics import call_at
from ..vector.numbers_at import Numbers, floats_at, keep, load_numbers
from ..vector.parallel import split_work, team_of_kernels
from ..vector.vector_ir import LANES
from .products import Products, Weights, part_of, parts_of_rows, routed, write_products


class ExpertCall(NamedTuple):
    """
    The arguments of a layer's experts.

    The first half of the first product's rows is the gate of the other half.

    Attributes:
        chosen: address of int64 `[tokens, choices]`, ids of experts; the number of experts is the padding id, for none.
        num_pairs: tokens * choices, at least 1.
        tokens: address of contiguous `[tokens, columns]`, float32 or bfloat16.
        choices: number of experts that a token chooses.
        is_bfloat16: whether tokens and biases are bfloat16, not float32.
        router_weights: address of contiguous `[tokens, choices]`, the factor of each choice.
        has_bfloat16_router_weights: whether these are bfloat16, not float32.
        up_bias: address of `[experts, rows]`, of the first product; 0 for none.
        down_bias: address of `[experts, rows]`, of the second product; 0 for none.
        out: address of contiguous float32 `[tokens, rows]`, written: the weighted sums.
    """

    chosen: int
    num_pairs: int
    tokens: int
    choices: int
    is_bfloat16: bool
    router_weights: int
    has_bfloat16_router_weights: bool
    up_bias: int
    down_bias: int
    out: int


class _Sums(NamedTuple):
    """One call of `_add_up`."""

    call: int  # address of `ExpertCall`
    results: int  # address of float32 [tokens, choices, rows]
    rows: int
    parts: int


def add_up_experts(up: Products, down: Products, call: ExpertCall) -> int:
    """
    Write the weighted sums of experts.

    Args:
        up: the first weights of the experts; those in full precision are of the type of the tokens.
        down: the second weights.
        call: the other arguments.

    Returns:
        The number of pairs with an invalid id; they add nothing.
    """
    fields = array("q", call)
    return int(_add_up_experts(team_of_kernels().address, up.address, down.address, fields.buffer_info()[0]))


@jit
def _add_up_experts(team, up, down, call):
    given, of_up, of_down = call_at(call, ExpertCall), call_at(up, Weights), call_at(down, Weights)
    is_bfloat16, pairs, rows = given.is_bfloat16 != 0, given.num_pairs, of_down.rows
    routing = routed(given.chosen, pairs, of_up.count, 0)
    # The gate reads whole vectors.
    states, results = np.empty(pairs * of_up.rows + LANES, np.float32), np.empty(pairs * rows, np.float32)
    states_at = Numbers(np.int64(states.ctypes.data), False)
    results_at = Numbers(np.int64(results.ctypes.data), False)
    write_products(
        team, up, routing, Numbers(given.tokens, is_bfloat16), given.choices, False,
        Numbers(given.up_bias, is_bfloat16), of_up.rows, states_at, pairs,
    )  # fmt: skip
    write_products(
        team, down, routing, states_at, 1, True, Numbers(given.down_bias, is_bfloat16), rows, results_at, pairs
    )
    keep(states)
    sums = _Sums(call, results_at.address, rows, parts_of_rows(pairs // given.choices, rows))
    split_work(team, sums.parts, _add_up, sums)
    keep(results)
    return routing.wrong


def expert_kernels() -> list[Needed]:
    """The kernel of a layer's experts."""
    return [(_add_up_experts, taking_numbers(_add_up_experts))]


@jit_function
def _add_up(part, sums):
    """Add up the weighted results of a part of the tokens."""
    call, rows = call_at(sums.call, ExpertCall), sums.rows
    router_weights = Numbers(call.router_weights, call.has_bfloat16_router_weights != 0)
    factors = np.empty(call.choices, np.float32)
    first, last = part_of(part, sums.parts, call.num_pairs // call.choices)
    for token in range(first, last):
        load_numbers(router_weights, token * call.choices, call.choices, factors)
        results = floats_at(sums.results + token * call.choices * rows * 4, (call.choices, rows))
        total = floats_at(call.out, (token + 1, rows))[token]
        total[:] = 0
        for choice in range(call.choices):
            for row in range(rows):
                total[row] += factors[choice] * results[choice, row]
