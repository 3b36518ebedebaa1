"""
Calls of the attention kernels: made at random, run in each way, and compared with float64.

    case, stored = make("bfloat16", 70, first=1, coded=3, group=4)  # 64 tokens, three blocks of codes, 70 tokens
    check(case, stored, way="integers", causal=True)

A way is "few", the kernel of decode steps; "integers", the same with queries and weights as integers where it reads
codes; or "many", the kernel of prompts, whose queries have the type of the keys.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hf_hybrid_cache.attention.queries import causal_tokens, seen_ranges
from hf_hybrid_cache.kernels import (
    BLOCK,
    PackedLayout,
    QuantizedBlocks,
    Shape,
    StoredBlocks,
    Strided,
    WorkingMemory,
    Workspace,
    attend_many,
    value_width,
)
from hf_hybrid_cache.kernels.vector.processor import has_bfloat16_products, set_integer_kernels, uses_integer_kernels
from kernels.reference import (
    Case,
    attention,
    attention_weights,
    random_quantized,
    stored,
    to_blocks,
)

# Relative to the largest value, for scores up to this: float32 holds a score to 6e-8 of itself, and adds up a few
# such roundings. torch's own attention in float32 reaches 2.8e-6 there.
BOUND, SCORES = 4e-6, 20.0
# Integers round the query and the weights: for codes of 8 bits to 16, for others to 8.
OF_INTEGERS, OF_8_BITS = 2e-3, 4e-4
# Where the processor multiplies pairs of bfloat16, weights and dequantized states of prompts are rounded to it.
OF_BFLOAT16 = 2**-9 if has_bfloat16_products() else BOUND
needs_dot_product = pytest.mark.skipif(
    not uses_integer_kernels(), reason="the processor has no integer dot products (x86-64 with AVX2)"
)
INTEGERS = pytest.param("integers", marks=needs_dot_product)
EVERY_WAY = pytest.mark.parametrize("way", ["few", INTEGERS, "many"])


class Stored(NamedTuple):
    """Keys and values in full precision as bits `[batch, num_kv_heads, tokens, dim]`, and the codes between them."""

    keys: np.ndarray
    values: np.ndarray
    codes: QuantizedBlocks | None = None

    def blocks(self, num_tokens: int) -> StoredBlocks:
        keys = to_blocks(self.keys, transposed=True, width=self.keys.shape[3])
        values = to_blocks(self.values, transposed=False, width=value_width(self.values.shape[3]))
        return recorded(num_tokens, keys, values, self.keys.shape[1], self.values.shape[3], self.codes)


def recorded(num_tokens: int, *arrays_and_sizes: Any) -> StoredBlocks:
    """Return a record as `StoredBlocks.write` takes it, which keeps the memory that it is of."""
    blocks = StoredBlocks()
    blocks.write(*arrays_and_sizes, place=arrays_and_sizes)
    blocks.count(num_tokens)
    return blocks


def make(
    storage: str,
    tokens: int,
    batch: int = 1,
    num_kv_heads: int = 1,
    group: int = 1,
    length: int = 1,
    dims: tuple[int, int] = (64, 64),
    first: int = 0,
    coded: int = 0,
    bits: tuple[int, int] = (4, 4),
    lanes: int = 64,
    is_rotated: bool = True,
    seed: int = 0,
    rounded_query: bool = False,
    scaling: str = "none",
) -> tuple[Case, Stored]:
    """
    Random numbers of `first` blocks, `coded` blocks and `tokens`; a rounded query is in `storage`, too.

    Channels of codes have "none" scaling, that of keys by "factors", or that and values times a "matrix".
    """
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    query = normal(batch, num_kv_heads * group, length, dims[0])
    query = stored(query, storage)[1] if rounded_query else query.astype(np.float64)
    states, full, packed = [], [], []
    for is_value, dim in enumerate(dims):
        before, between = first * BLOCK, np.empty((batch, num_kv_heads, 0, dim))
        if coded:
            sizes = batch, num_kv_heads, coded, dim
            records, between = random_quantized(generator, sizes, bits[is_value], lanes, not is_value, is_rotated)
            packed.append(records)
        in_full, exact = stored(normal(batch, num_kv_heads, before + tokens, dim), storage)
        states.append(np.concatenate([exact[:, :, :before], between, exact[:, :, before:]], axis=2))
        full.append(in_full)
    codes = None
    if coded:
        layouts = (
            PackedLayout.of_keys(bits[0], dims[0], lanes, is_rotated),
            PackedLayout.of_values(bits[1], dims[1], lanes, is_rotated),
        )
        assert [part.shape[2] for part in packed] == [layout.num_bytes for layout in layouts]
        codes = QuantizedBlocks(*packed, first, coded, *layouts)
        span = slice(first * BLOCK, (first + coded) * BLOCK)
        if scaling != "none":
            factors = np.exp(normal(num_kv_heads, dims[0]))
            states[0][:, :, span] *= factors[:, None]
            codes = codes._replace(query_factors=factors)
        if scaling == "matrix":
            axes = np.linalg.qr(normal(num_kv_heads, dims[1], dims[1]))[0]
            matrix = (axes * generator.uniform(0.5, 2, (num_kv_heads, 1, dims[1]))).astype(np.float32)
            states[1][:, :, span] = states[1][:, :, span] @ matrix
            codes = codes._replace(rotation_matrix=matrix)
    return Case(query, *states), Stored(full[0], full[1], codes)


def run(
    case: Case,
    stored: Stored,
    scale: float = 0.125,
    way: str = "few",
    memory: WorkingMemory | None = None,
    workspace: Workspace | None = None,
    **masks: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend; return the result `[batch, query_heads, query_length, value_dim]` and the log-sum-exp."""
    if way == "many":
        return attend_to_prompt(case, stored, scale, memory, **masks)
    workspace = workspace or workspace_of(case, memory)
    set_integer_kernels(None if way == "integers" else False)
    try:
        assert stored.codes is None or uses_integer_kernels() == (way == "integers")
        if masks.pop("causal", False):  # otherwise what is seen is given as an array
            masks = with_ranges(case, True, **masks)
        return attend_to(workspace, case.query, stored.blocks(case.tokens), scale, **masks), workspace.lse.copy()
    finally:
        set_integer_kernels(None)


def with_ranges(case: Case, causal: bool = False, visible: np.ndarray | None = None, **masks: Any) -> dict[str, Any]:
    """Return masks as the kernels take them: what is seen as ranges, and as an array if that is not all."""
    ranges = causal_tokens(case.query.shape[2], case.tokens).ranges if causal else np.array([[[[0, case.tokens]]]])
    if visible is not None:
        visible = visible & (np.arange(case.tokens) < ranges[..., 1:])
        ranges, are_too_wide = seen_ranges(torch.from_numpy(visible).bool())
        visible = visible if are_too_wide else None
    return masks | {"seen": ranges, "visible": visible}


def workspace_of(case: Case, memory: WorkingMemory | None = None) -> Workspace:
    batch, _, length, key_dim = case.query.shape
    return Workspace(Shape(batch, case.keys.shape[1], case.group, length, key_dim, case.values.shape[3]), memory)


def attend_to(workspace: Workspace, query: np.ndarray, *arguments: Any, **options: Any) -> np.ndarray:
    """
    Attend with `query`, `[batch, query_heads, query_length, key_dim]`, which is given in bfloat16 if it fits that.

    Heads of a token follow each other in memory, as those of a model do. What is written in the type of the query must
    be the same, rounded.
    """
    given = torch.from_numpy(query.astype(np.float32)).transpose(1, 2).contiguous().transpose(1, 2)
    if torch.equal(given, given.bfloat16().float()):
        given = given.bfloat16()
    out, rounded = (
        torch.empty(*given.shape[:3], workspace.shape.value_dim, dtype=dtype) for dtype in (torch.float32, given.dtype)
    )
    for written in (out, rounded):
        workspace.attend(strided(given), strided(written), *arguments, **options)
    torch.testing.assert_close(rounded, out.to(rounded.dtype), rtol=0, atol=0, equal_nan=True)
    return out.numpy()


def strided(states: torch.Tensor) -> Strided:
    sequence, head, token = (stride * states.element_size() for stride in states.stride()[:3])
    return Strided(states.data_ptr(), sequence, head, token, states.dtype == torch.bfloat16)


def attend_to_prompt(
    case: Case, stored: Stored, scale: float, memory: WorkingMemory | None = None, **masks: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Attend with many queries, in transformers' layout, one token after the other, and in the type of the keys."""
    batch, heads, length, _ = case.query.shape
    query = torch.from_numpy(query_of_prompt(case, stored)).float().transpose(1, 2).contiguous()
    query = query.bfloat16() if stored.keys.dtype == np.uint16 else query
    lse, masks = np.empty((batch, heads, length), np.float32), with_ranges(case, **masks)
    out, rounded = (
        torch.empty(batch, length, heads, case.values.shape[3], dtype=dtype) for dtype in (torch.float32, query.dtype)
    )
    for written in (rounded, out):
        ends = (strided(each.transpose(1, 2)) for each in (query, written))
        attend_many(*ends, lse, stored.blocks(case.tokens), scale, memory=memory, **masks)
    torch.testing.assert_close(rounded, out.to(rounded.dtype), rtol=0, atol=0, equal_nan=True)
    return out.transpose(1, 2).numpy(), lse


def query_of_prompt(case: Case, bits: Stored) -> np.ndarray:
    """Return the query in the type of the keys, in float64."""
    return stored(case.query, "bfloat16")[1] if bits.keys.dtype == np.uint16 else case.query


def check(case: Case, stored: Stored, scale: float = 0.125, way: str = "few", **masks: Any) -> None:
    """Run a call, and compare it with float64 within what its types and its way round."""
    if way == "many":
        case = Case(query_of_prompt(case, stored), case.keys, case.values)
    out, lse = run(case, stored, scale, way, **masks)
    expected, expected_lse = attention(case, scale, **masks)
    bound, lse_bound = bound_of(case, stored, scale, way), np.zeros(1)
    if way == "integers" and bound != OF_8_BITS:
        # Queries are rounded to 8 bits; with many weights the errors of their scores average out.
        of_a_score = (
            scale * np.abs(case.query).max(axis=3) / 127 / np.sqrt(12) * np.linalg.norm(case.keys, axis=3).max()
        )
        lse_bound = 4 * of_a_score * np.linalg.norm(attention_weights(case, scale, **masks)[0], axis=3)
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * np.abs(case.values).max())
    seen = ~np.isneginf(expected_lse)
    np.testing.assert_array_equal(~np.isneginf(lse), seen)
    largest = np.maximum(bound + bound * np.abs(expected_lse), lse_bound)  # infinite where nothing is seen
    np.testing.assert_array_less(np.abs(lse[seen] - expected_lse[seen]), largest[seen])


def bound_of(case: Case, stored: Stored, scale: float, way: str) -> float:
    """Return the largest error, relative to the largest value."""
    if way == "many" and stored.keys.dtype == np.uint16:
        return 2 * OF_BFLOAT16  # keys of codes are rounded as well, and rotated queries
    if way != "integers":
        return BOUND
    assert stored.codes is not None
    if stored.codes.key_layout.bits == stored.codes.value_layout.bits == 8:
        return OF_8_BITS
    # The effect of rounding a score is relative to the spread of scores.
    return OF_INTEGERS * max(1.0, float(products_of(case).std(axis=3).max() * scale))


def products_of(case: Case) -> np.ndarray:
    """Return the products of queries and keys, `[batch, query_heads, query_length, tokens]`."""
    return np.einsum("bhqd,bhtd->bhqt", case.query, np.repeat(case.keys, case.group, axis=1))


def scale_for_scores(case: Case, highest: float) -> float:
    """Return the scale with which the highest score is `highest`."""
    return float(np.float32(highest / np.abs(products_of(case)).max()))
