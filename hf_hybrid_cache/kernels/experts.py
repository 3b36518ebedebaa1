"""
Gated experts of a layer by one call: two products, the gate between them, and the weighted sum of each token's choices.

In the places of a routing, that is by expert, everything is in float32 from the first product to the sum.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .compiled import jit_part
from .numbers_at import Numbers, load_numbers
from .parallel import share_out
from .routing import routed
from .tiles import LOG2_E, pointer
from .vector_ir import FLOATS, LANES

# Numbers that a thread takes at a time: with fewer, waking another one would take longer.
_PART_NUMBERS = 2**15
# Of the power of two in the gate.
_DEGREE = 6


class ExpertCall(NamedTuple):
    """
    What the experts of a layer are to compute, in addresses.

    The first product gives the gate's numbers, then as many that are gated.

    Attributes:
        chosen: of int64 `[tokens, choices]`, indices of experts; that of the first beyond for none.
        num_pairs: tokens * choices, at least 1.
        tokens: of contiguous `[tokens, columns]`, float32 or bfloat16.
        choices: of a token.
        is_bfloat16: the type of tokens and biases.
        shares: of contiguous `[tokens, choices]`: what a choice counts.
        has_bfloat16_shares: their type, or float32.
        up_bias: of `[experts, rows]`; 0 for none.
        down_bias: likewise.
        out: of contiguous float32 `[tokens, rows]`, the sums.
    """

    chosen: int
    num_pairs: int
    tokens: int
    choices: int
    is_bfloat16: bool
    shares: int
    has_bfloat16_shares: bool
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
    places: Any  # int64 [pairs], -1 for those that count nothing
    shares: Any  # float32 [pairs]
    out: Any  # float32 [tokens, rows]
    parts: int


@jit_part
def _parts(array):
    """In how many its rows are shared out."""
    return max(1, min(array.shape[0], array.size // _PART_NUMBERS))


@jit_part
def _keep(array):
    """Let an array be there until now: Numba gives it back after its last use, whoever has its address."""
    return array.size


@jit_part
def _gate(part, given):
    """Of some places."""
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
        # Of a number of at most 0, so that it cannot be too large; the other half of the curve is its mirror image.
        power = vec.exp2(context, builder, builder.fmul(size, vec.floats(-LOG2_E)), _DEGREE)
        numerator = builder.select(builder.fcmp_ordered("<", gate, vec.floats(0.0)), power, vec.floats(1.0))
        sigmoid = builder.fdiv(numerator, builder.fadd(power, vec.floats(1.0)))
        vec.store(builder, builder.fmul(builder.fmul(gate, sigmoid), up), out)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@jit_part
def _add_up(part, given):
    """Of some tokens."""
    count, choices = len(given.out), given.places.size // len(given.out)
    for token in range(part * count // given.parts, (part + 1) * count // given.parts):
        total = given.out[token]
        total[:] = 0
        for pair in range(token * choices, (token + 1) * choices):
            if given.places[pair] >= 0:
                states, share = given.states[given.places[pair]], given.shares[pair]
                for row in range(total.size):
                    total[row] += share * states[row]


def adding_up_experts(write_products):
    """
    The kernel for experts whose weights are of one kind.

    Made for each kind, because Numba keeps no compiled function that is told another one.

    write_products: writes products with such weights.
    """

    @jit_part
    def add_up_experts(parallel, team, threads, up, down, call):
        """Write the sums that `call` asks for; returns how many of its indices are wrong."""
        routing = routed(call.chosen, call.num_pairs, up.matrices, 0)
        count = routing.starts[-1]
        pairs, own = routing.pairs[:count], np.arange(count)

        states, gated = np.empty((count, up.rows), np.float32), np.empty((count, down.columns), np.float32)
        write_products(
            parallel, team, threads, up, routing, pairs // call.choices, Numbers(call.tokens, call.is_bfloat16),
            own, Numbers(call.up_bias, call.is_bfloat16), up.rows, Numbers(states.ctypes.data, False),
        )  # fmt: skip
        gating = Gating(states, gated, _parts(gated))
        share_out(parallel, team, threads, gating.parts, _gate, gating)

        results = np.empty((count, down.rows), np.float32)
        write_products(
            parallel, team, threads, down, routing, own, Numbers(gated.ctypes.data, False),
            own, Numbers(call.down_bias, call.is_bfloat16), down.rows, Numbers(results.ctypes.data, False),
        )  # fmt: skip
        _keep(gated)
        places, shares = np.full(call.num_pairs, -1), np.empty(call.num_pairs, np.float32)
        for place in range(count):
            places[pairs[place]] = place
        load_numbers(Numbers(call.shares, call.has_bfloat16_shares), 0, call.num_pairs, shares)
        out = numba.carray(pointer(call.out, np.float32(0)), (call.num_pairs // call.choices, down.rows))
        sums = Sums(results, places, shares, out, _parts(out))
        share_out(parallel, team, threads, sums.parts, _add_up, sums)
        return routing.wrong

    return add_up_experts
