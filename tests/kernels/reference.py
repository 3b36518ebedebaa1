"""Attention in float64, and blocks made token by token: nothing of the kernels is used here."""

from dataclasses import dataclass

import numpy as np

ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}


@dataclass
class Case:
    """
    One call, in float64, with keys and values as they are stored.

    Attributes:
        query: [batch, query_heads, query_length, key_dim]
        keys: [batch, num_kv_heads, tokens, key_dim]
        values: [batch, num_kv_heads, tokens, value_dim]
    """

    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.keys.shape[1]


def stored(states: np.ndarray, storage: str) -> tuple[np.ndarray, np.ndarray]:
    """What is left of float32 `states` in `storage`: its bits as the kernels see them, and its value in float64."""
    states = np.asarray(states, np.float32)
    if storage == "float32":
        return states, states.astype(np.float64)
    if storage == "float16":
        with np.errstate(over="ignore"):
            halves = states.astype(np.float16)
        return halves.view(np.int16), halves.astype(np.float64)
    bits = (states.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_blocks(bits: np.ndarray, transposed: bool, width: int, garbage: float = np.nan) -> np.ndarray:
    """`[batch, heads, tokens, dim]` as blocks of 64 tokens; what is not stored is garbage, but for filled-up values."""
    batch, heads, tokens, dim = bits.shape
    blocks = np.zeros((-(-tokens // 64), batch * heads, 64, width), bits.dtype)
    junk = {np.float32: np.float32(garbage), np.uint16: np.uint16(0x7FC0), np.int16: np.int16(0x7E00)}[bits.dtype.type]
    blocks[..., :dim] = junk
    for token in range(tokens):
        blocks[token // 64, :, token % 64, :dim] = bits[:, :, token].reshape(batch * heads, dim)
    return np.ascontiguousarray(blocks.swapaxes(2, 3)) if transposed else blocks


def attention(
    case: Case, scale: float, causal: bool = False, visible: np.ndarray | None = None, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """`[batch, query_heads, query_length, value_dim]` and its log-sum-exp; zeros and -inf where nothing is seen."""
    keys, values = (np.repeat(states, case.group, axis=1) for states in (case.keys, case.values))
    scores = np.einsum("bhqd,bhtd->bhqt", case.query, keys) * scale
    if bias is not None:
        scores = scores + bias.astype(np.float64)
    if visible is not None:
        scores = np.where(visible != 0, scores, -np.inf)
    if causal:
        length = scores.shape[2]
        seen = np.arange(case.tokens) <= case.tokens - length + np.arange(length)[:, None]
        scores = np.where(seen, scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    base = np.where(np.isneginf(highest), 0.0, highest)
    weights = np.exp(scores - base)
    total = weights.sum(axis=-1, keepdims=True)
    out = np.einsum("bhqt,bhtd->bhqd", weights, values) / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return out, (base + np.log(total))[..., 0]
