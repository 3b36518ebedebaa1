"""
The operations of a decode step: products, norms, rotary embedding, attention over the cache, gates.

Each does a part of what its call in memory describes. Numbers between two operations are of the model's type, float32
or bfloat16, rounded as torch rounds them.
"""

from typing import NamedTuple

from ..attention.attention import take_queries
from ..attention.attention_call import stored_at
from ..vector.compiled import jit, jit_inlined
from ..vector.intrinsics import call_at
from ..vector.numbers_at import as_double
from ..vector.vector_ir import BLOCK
from ..weights.operands import write_gated
from ..weights.products import take_tokens
from .states import embed_position, normalize, scatter


class Norm(NamedTuple):
    """A root mean square norm of rows, after a residual is added; and the operand of the product with it."""

    states: int  # address of [rows, columns], written if something is added
    added: int  # address of [rows, columns]; 0 for nothing
    weight: int  # address of [columns]
    epsilon: int  # bits of a float64
    columns: int
    is_bfloat16: int
    out: int  # address of [rows, columns]
    product: int  # address of a `Product` that takes the result; 0 for none


class Heads(NamedTuple):
    """The new token's keys, values and queries: normalized, rotated, and brought to cache and attention."""

    query: int  # address of [rows, heads, head_dim], written
    key: int  # address of [rows, KV heads, head_dim], written
    value: int  # the same
    num_kv_heads: int
    group: int
    head_dim: int
    is_bfloat16: int
    query_norm: int  # address of the weight [head_dim]; 0 for none
    key_norm: int
    epsilon: int  # bits of a float64
    is_rotated: int
    cosines: int  # address of [rows, head_dim]
    sines: int
    attention: int  # address of an `AttentionCall`; the new token is the last one of what is stored


class Gate(NamedTuple):
    """The gated states of a feed-forward network, written over the gate, and the operand of the product with them."""

    gate: int  # address of [rows, columns], written
    up: int
    columns: int
    is_bfloat16: int
    product: int  # address of a `Product`


@jit
def take_norm(row, call):
    given = call_at(call, Norm)
    is_bfloat16 = given.is_bfloat16 != 0
    offset, epsilon = row * given.columns * (2 if is_bfloat16 else 4), as_double(given.epsilon)
    added = given.added + offset if given.added else 0
    states, out = given.states + offset, given.out + offset
    normalize(states, added, given.weight, epsilon, given.columns, is_bfloat16, out)
    if given.product:
        take_tokens(row, given.product)


@jit
def take_gated(row, call):
    given = call_at(call, Gate)
    is_bfloat16 = given.is_bfloat16 != 0
    offset = row * given.columns * (2 if is_bfloat16 else 4)
    write_gated(given.gate + offset, given.up + offset, is_bfloat16, given.columns, given.gate + offset)
    take_tokens(row, given.product)


@jit
def take_heads(head, call):
    """Bring key and value of a KV head to the cache, and its queries to attention."""
    given = call_at(call, Heads)
    row, dim, item = head // given.num_kv_heads, given.head_dim, 2 if given.is_bfloat16 else 4
    stored, key, value = stored_at(given.attention), given.key + head * dim * item, given.value + head * dim * item
    block, token = divmod(stored.num_tokens - 1 - stored.quantized_blocks * BLOCK, BLOCK)
    place = block * stored.heads + head
    _turn(key, row, given.key_norm, call)
    scatter(key, dim, stored.keys + place * stored.key_bytes + token * item, BLOCK * item, item)
    scatter(value, dim, stored.values + place * stored.value_bytes + token * stored.width * item, item, item)
    for group in range(given.group):
        _turn(given.query + (head * given.group + group) * dim * item, row, given.query_norm, call)
    take_queries(head, given.attention)


@jit_inlined
def _turn(head, row, weight, call):
    """Normalize a head if the model does, and rotate it by the angles of its row's position."""
    given = call_at(call, Heads)
    dim, is_bfloat16 = given.head_dim, given.is_bfloat16 != 0
    if weight:
        normalize(head, 0, weight, as_double(given.epsilon), dim, is_bfloat16, head)
    if given.is_rotated:
        angles = row * dim * (2 if is_bfloat16 else 4)
        embed_position(head, given.cosines + angles, given.sines + angles, dim, is_bfloat16)
