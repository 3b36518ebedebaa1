"""Attention in float64, and blocks made token by token: nothing of the kernels is used here."""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch

ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}


@dataclass
class Case:
    """
    The arguments of one call, in float64, with keys and values as they are stored.

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
    """Convert float32 `states` to `storage`; return the bits for kernels, and the values in float64."""
    states = np.asarray(states, np.float32)
    if storage == "float32":
        return states, states.astype(np.float64)
    if storage == "float16":
        with np.errstate(over="ignore"):
            halves = states.astype(np.float16)
        return halves.view(np.int16), halves.astype(np.float64)
    bits = (states.view(np.uint32) >> 16).astype(np.uint16)
    return bits, from_bfloat16(bits)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_blocks(bits: np.ndarray, transposed: bool, width: int, garbage: float = np.nan) -> np.ndarray:
    """`[batch, heads, tokens, dim]` as blocks of 64 tokens; what is not stored is garbage, but for filled-up values."""
    batch, heads, tokens, dim = bits.shape
    blocks = np.zeros((-(-tokens // 64), batch * heads, 64, width), bits.dtype)
    junk = {np.float32: np.float32(garbage), np.uint16: np.uint16(0x7FC0), np.int16: np.int16(0x7E00)}[bits.dtype.type]
    blocks[..., :dim] = junk
    for token in range(tokens):
        blocks[token // 64, :, token % 64, :dim] = bits[:, :, token].reshape(batch * heads, dim)
    return np.ascontiguousarray(blocks.swapaxes(2, 3)) if transposed else blocks


def attention(case: Case, scale: float, **masks: Any) -> tuple[np.ndarray, np.ndarray]:
    """`[batch, query_heads, query_length, value_dim]` and its log-sum-exp; zeros and -inf where nothing is seen."""
    weights, lse = attention_weights(case, scale, **masks)
    return np.einsum("bhqt,bhtd->bhqd", weights, np.repeat(case.values, case.group, axis=1)), lse


def attention_weights(
    case: Case,
    scale: float,
    causal: bool = False,
    visible: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    cap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention weights of tokens, `[batch, query_heads, query_length, tokens]`, and the log-sum-exp."""
    scores = np.einsum("bhqd,bhtd->bhqt", case.query, np.repeat(case.keys, case.group, axis=1)) * scale
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias.astype(np.float64)
    if visible is not None:
        scores = np.where(visible != 0, scores, -np.inf)
    if causal:
        scores = np.where(_seen_causally(case), scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    base = np.where(np.isneginf(highest), 0.0, highest)
    weights = np.exp(scores - base)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / np.where(total == 0, 1, total), (base + np.log(total))[..., 0]


def as_torch_mask(
    case: Case,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    visible: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> torch.Tensor | None:
    """Return masks as the one that torch's attention takes; a bias has `dtype`."""
    mask = None if visible is None else torch.from_numpy(visible).bool()
    if bias is not None:
        mask = torch.from_numpy(bias).to(dtype)
    if causal:
        seen = torch.from_numpy(_seen_causally(case))[None, None]
        if mask is None:
            return seen
        mask = mask & seen if bias is None else mask.masked_fill(~seen, -torch.inf)
    return mask


def _seen_causally(case: Case) -> np.ndarray:
    """`[query_length, tokens]`: the queries are the last tokens, and each sees those before it and itself."""
    length = case.query.shape[2]
    return np.arange(case.tokens) <= case.tokens - length + np.arange(length)[:, None]


def _places_of_codes(inner: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the word that each of the codes of a lane is in, and its lowest bit there."""
    chunk, place = np.divmod(np.arange(inner), 16)
    half, pair = np.divmod(place, 8)
    word, position = np.divmod(chunk * 8 + pair, 16 // bits)
    return word, (position * bits + half * 16).astype(np.uint32)[:, None]


def to_record(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray, bits: int) -> np.ndarray:
    """
    The record of one block as `kernels.forms.blocks` describes it.

    codes: `[inner, lanes]`; scales, minima: bfloat16 bits `[groups, inner]`.
    """
    inner, lanes = codes.shape
    words, (word, lowest_bit) = np.zeros((inner * bits // 32, lanes), np.uint32), _places_of_codes(inner, bits)
    np.bitwise_or.at(words, word, codes.astype(np.uint32) << lowest_bit)
    return np.concatenate([part.ravel().view(np.uint8) for part in (words, scales, minima)])


def from_record(
    record: np.ndarray, sizes: tuple[int, int, int], bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes `[inner, lanes]`, scales and minima `[groups, inner]` in float64: the inverse of `to_record`."""
    inner, lanes, groups = sizes
    size = inner * bits // 32 * lanes * 4
    scales, minima = from_bfloat16(record[size:].view(np.uint16)).reshape(2, groups, inner)
    word, lowest_bit = _places_of_codes(inner, bits)
    codes = record[:size].view(np.uint32).reshape(-1, lanes)[word] >> lowest_bit & np.uint32(2**bits - 1)
    return codes, scales, minima


def hadamard(dim: int) -> np.ndarray:
    """Return the Hadamard matrix of the largest power of two that divides `dim`, once for each run of that length."""
    matrix = np.ones((1, 1))
    while dim % (2 * len(matrix)) == 0:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return np.kron(np.eye(dim // len(matrix)), matrix / np.sqrt(len(matrix)))


def random_quantized(
    generator: np.random.Generator,
    sizes: tuple[int, int, int, int],
    bits: int,
    group: int,
    transposed: bool,
    is_rotated: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Make random records of `(batch, heads, blocks, dim)`; keys are transposed.

    Codes beyond `dim` are garbage without a scale.

    Returns:
        tuple: uint8 `[blocks, batch * heads, bytes]`, and the states that they stand for,
        float64 `[batch, heads, blocks * 64, dim]`.
    """
    batch, heads, blocks, dim = sizes
    filled = -(-dim // 16) * 16
    inner, lanes = (filled, 64) if transposed else (64, filled)
    groups = -(-lanes // group)
    records, states = [], np.empty((blocks, batch * heads, 64, dim))
    for block, head in np.ndindex(blocks, batch * heads):
        codes = generator.integers(0, 2**bits, (inner, lanes))
        scale_bits, scales = stored(generator.uniform(0.5, 2, (groups, inner)) / 2**bits, "bfloat16")
        minimum_bits, minima = stored(generator.uniform(-2, 0, (groups, inner)), "bfloat16")
        if transposed:
            scale_bits[:, dim:], minimum_bits[:, dim:] = 0, 0
        group_of_lane = np.minimum(np.arange(lanes) // group, groups - 1)
        decoded = minima.T[:, group_of_lane] + scales.T[:, group_of_lane] * codes
        states[block, head] = (decoded.T if transposed else decoded)[:, :dim]
        if is_rotated:
            states[block, head] @= hadamard(dim)
        records.append(to_record(codes, scale_bits, minimum_bits, bits))
    states = states.reshape(blocks, batch, heads, 64, dim).transpose(1, 2, 0, 3, 4)
    return np.stack(records).reshape(blocks, batch * heads, -1), states.reshape(batch, heads, blocks * 64, dim)


def random_masks(draw: st.DrawFn, case: Case, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Draw masks of any kind, as keyword arguments of `attention`; each size but the last may be 1."""
    generator = np.random.default_rng(seed)
    shape = (*(size if draw(st.booleans()) else 1 for size in case.query.shape[:3]), case.tokens)
    masks: dict[str, Any] = {"causal": draw(st.booleans())}
    kind = draw(st.sampled_from(["none", "visible", "span", "bias"]))
    if kind == "span":  # hides whole blocks, often the first tokens, as padding does, or all
        places = st.integers(0, case.tokens)
        first, last = draw(st.just(0) | places), draw(st.just(case.tokens) | places)
        masks["visible"] = np.ones(shape, np.uint8)
        masks["visible"][-1, ..., first:last] = 0
    elif kind == "visible":
        masks["visible"] = (generator.random(shape) < draw(st.floats(0, 1))).astype(np.uint8)
    elif kind == "bias":
        masks["bias"] = torch.from_numpy(generator.standard_normal(shape)).to(dtype).float().numpy()
        masks["bias"][generator.random(shape) < 0.3] = -np.inf
    return masks
