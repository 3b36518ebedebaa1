"""Attention of chunks, by the kernel and by torch, against attention in float64 over the same states."""

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from kernels.reference import Case, as_torch_mask, attention, random_masks
from transformers import LlamaConfig

from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache, minmax
from hf_hybrid_cache.attention import torch_attention
from hf_hybrid_cache.attention.host_attention import HostAttention
from hf_hybrid_cache.attention.queries import Queries
from hf_hybrid_cache.kernels.attention.workspace import set_prefill_kernel
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels
from hf_hybrid_cache.storage import CacheStats, Store

from common.soak import count, search_at_random

CONFIG = LlamaConfig(num_hidden_layers=1)
CACHES = {
    "full": DynamicHybridCache,
    "codes": lambda config: QuantizedHybridCache(config, 4),
    "codes_without_sinks": lambda config: HybridCache(config, codec=minmax(8, sink_tokens=0)),
}
# Relative to the largest value: the results of pieces are rounded before they are merged, and then again.
BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


def attend_by_kernel(queries: Queries, store: Store) -> torch.Tensor:
    return HostAttention(CacheStats()).attend(queries, store)


def attend_by_torch(queries: Queries, store: Store) -> torch.Tensor:
    return torch_attention.attend_in_pieces(queries, store).out.to(queries.states.dtype)


WAYS = {"kernel": attend_by_kernel, "torch": attend_by_torch}


@pytest.fixture(autouse=True)
def small_pieces_and_kernel_for_many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_attention, "PIECE_TOKENS", 128)
    set_prefill_kernel(True)
    set_integer_kernels(False)  # of few queries, which round more; they have tests of their own
    yield
    set_prefill_kernel(None)
    set_integer_kernels(None)


def filled(cache: HybridCache, tokens: int, dims: tuple[int, int], dtype: torch.dtype, seed: int = 0, **sizes: int):
    """A store of random states, and these in float64, as they are stored."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.get("batch", 2), sizes.get("num_kv_heads", 2), tokens)
    keys, values = (torch.randn(*shape, dim, generator=generator).to(dtype) for dim in dims)
    cache.update(keys, values, 0)
    store = cache.layers[0].store
    assert isinstance(store, Store)
    store.settle()
    return store, [states.double().numpy() for states in store.read()]


def check(way: str, store: Store, case: Case, dtype: torch.dtype, scale: float = 0.3, **masks) -> None:
    mask = as_torch_mask(case, dtype, **masks)
    out = WAYS[way](Queries(torch.from_numpy(case.query).to(dtype), case.group, scale, mask), store)
    assert out.dtype == dtype
    expected, _ = attention(case, scale, **masks)
    np.testing.assert_allclose(out.double(), expected, rtol=0, atol=BOUNDS[dtype] * np.abs(case.values).max())


def queries(length: int, heads: int, dim: int, dtype: torch.dtype, batch: int = 2, seed: int = 1) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, length, dim, generator=generator).to(dtype).double().numpy()


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
@search_at_random(20)
@given(data=st.data())
def test_attention_when_shapes_and_masks_are_random_then_is_exact(way: str, data: st.DataObject):
    draw = data.draw
    dtype, make = draw(st.sampled_from(list(BOUNDS))), draw(st.sampled_from(list(CACHES.values())))
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    tokens = draw(st.sampled_from([65, 127, 128, 129, 192, 193, 256, 1000]) | st.integers(1, 600))
    dim, seed = draw(st.integers(1, 40)), draw(st.integers(0, 2**32 - 1))
    dims = (dim, draw(st.sampled_from([dim, dim + 3])))
    store, (keys, values) = filled(make(CONFIG), tokens, dims, dtype, seed, batch=batch, num_kv_heads=heads)
    query = queries(draw(st.integers(1, min(tokens, 200))), heads * group, dim, dtype, batch, seed)
    case = Case(query, keys, values)
    check(way, store, case, dtype, dim**-0.5, **random_masks(draw, case, seed, dtype))
    count("attention compared with float64")


def test_chunk_attention_when_unpacking_then_holds_one_piece():
    store, _ = filled(QuantizedHybridCache(CONFIG, 4), 1000, (16, 16), torch.float32)
    pieces = [states for _, states in store.in_pieces(128)]
    for index, whole in enumerate(store.read()):
        assert max(states[index].shape[2] for states in pieces) <= 128
        assert torch.equal(torch.cat([states[index] for states in pieces], dim=2), whole)
