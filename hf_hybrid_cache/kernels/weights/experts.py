"""
The gated experts of a layer in one call.

It makes two products, the gate between them, and the weighted sum of a token's choices. Intermediate results are
float32, in the places of the routing, that is sorted by expert.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.compiled import jit_function
from ..vector.numbers_at import Numbers, keep, load_numbers
from ..vector.parallel import split_work
from ..vector.tiles import LOG2_E, pointer
from ..vector.vector_ir import FLOATS, LANES
from .routing import routed

# Numbers that a thread takes at a time. To wake another thread for fewer would take longer.
_PART_NUMBERS = 2**15
# Degree of the power of two in the gate, see `vector_ir.exp2`.
_DEGREE = 6


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


class Gating(NamedTuple):
    """One call of `_gate`."""

    states: Any  # float32 [places, 2 * columns]
    gated: Any  # float32 [places, columns]
    parts: int


class Sums(NamedTuple):
    """One call of `_add_up`."""

    states: Any  # float32 [places, rows]
    places: Any  # int64 [pairs], -1 for a pair without an expert
    router_weights: Any  # float32 [pairs]
    out: Any  # float32 [tokens, rows]
    parts: int


@jit_function
def _parts(array):
    """Number of parts in which threads take the rows of an array."""
    return max(1, min(array.shape[0], array.size // _PART_NUMBERS))


@jit_function
def _gate(part, given):
    """Apply the gate in a part of the places."""
    count, columns = given.gated.shape
    whole = columns // LANES * LANES
    scratch = np.zeros((2, LANES), np.float32)
    for place in range(part * count // given.parts, (part + 1) * count // given.parts):
        states, gated = given.states[place], given.gated[place]
        for first in range(0, whole, LANES):
            gate = states.ctypes.data + first * 4
            _write_gated(gate, gate + columns * 4, gated.ctypes.data + first * 4)
        left = columns - whole
        if left:
            scratch[0, :left], scratch[1, :left] = states[whole:columns], states[columns + whole :]
            at = scratch.ctypes.data
            _write_gated(at, at + LANES * 4, at)
            gated[whole:] = scratch[0, :left]


@intrinsic
def _write_gated(typing_context: Any, gate: Any, up: Any, out: Any) -> Any:
    """Write `gate * sigmoid(gate) * up`, addresses of sixteen float32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        gate, up, out = arguments
        gate, up = (vec.load(builder, each, FLOATS) for each in (gate, up))
        size = vec.absolute(builder, gate)
        # The power of -|gate| cannot overflow; the numerator makes it the sigmoid of either sign.
        power = vec.exp2(context, builder, builder.fmul(size, vec.floats(-LOG2_E)), _DEGREE)
        numerator = builder.select(builder.fcmp_ordered("<", gate, vec.floats(0.0)), power, vec.floats(1.0))
        sigmoid = builder.fdiv(numerator, builder.fadd(power, vec.floats(1.0)))
        vec.store(builder, builder.fmul(builder.fmul(gate, sigmoid), up), out)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@jit_function
def _add_up(part, given):
    """Add up the weighted results of a part of the tokens."""
    count, choices = len(given.out), given.places.size // len(given.out)
    for token in range(part * count // given.parts, (part + 1) * count // given.parts):
        total = given.out[token]
        total[:] = 0
        for pair in range(token * choices, (token + 1) * choices):
            if given.places[pair] >= 0:
                states, router_weight = given.states[given.places[pair]], given.router_weights[pair]
                for row in range(total.size):
                    total[row] += router_weight * states[row]


def adding_up_experts(write_products):
    """
    Make the function that computes experts with one kind of weights.

    Numba keeps no compiled function that takes another as an argument, so each kind has its own.

    write_products: a jitted function that writes products with such weights.
    """

    @jit_function
    def add_up_experts(team, up, down, call):
        """Write the sums that `call` asks for; returns the number of pairs with an invalid expert id."""
        routing = routed(call.chosen, call.num_pairs, up.matrices, 0)
        count = routing.starts[-1]
        pairs, own = routing.pairs[:count], np.arange(count)

        states, gated = np.empty((count, up.rows), np.float32), np.empty((count, down.columns), np.float32)
        write_products(
            team, up, routing, pairs // call.choices, Numbers(call.tokens, call.is_bfloat16),
            own, Numbers(call.up_bias, call.is_bfloat16), up.rows, Numbers(states.ctypes.data, False),
        )  # fmt: skip
        gating = Gating(states=states, gated=gated, parts=_parts(gated))
        split_work(team, gating.parts, _gate, gating)

        results = np.empty((count, down.rows), np.float32)
        write_products(
            team, down, routing, own, Numbers(gated.ctypes.data, False),
            own, Numbers(call.down_bias, call.is_bfloat16), down.rows, Numbers(results.ctypes.data, False),
        )  # fmt: skip
        keep(gated)
        places, router_weights = np.full(call.num_pairs, -1), np.empty(call.num_pairs, np.float32)
        for place in range(count):
            places[pairs[place]] = place
        load_numbers(Numbers(call.router_weights, call.has_bfloat16_router_weights), 0, call.num_pairs, router_weights)
        out = numba.carray(pointer(call.out, np.float32(0)), (call.num_pairs // call.choices, down.rows))
        sums = Sums(states=results, places=places, router_weights=router_weights, out=out, parts=_parts(out))
        split_work(team, sums.parts, _add_up, sums)
        return routing.wrong

    return add_up_experts
