"""Memory that attention on the CPU works in, and what it makes of masks: told, given back, and not kept for later."""

import weakref

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache

from models.tiny_models import llama

CONFIG = llama()
HEADS, KV_HEADS, DIM = CONFIG.num_attention_heads, CONFIG.num_key_value_heads, CONFIG.head_dim


def filled(cache: HybridCache, batch: int, tokens: int) -> HybridCache:
    for layer in range(CONFIG.num_hidden_layers):
        cache.update(*torch.randn(2, batch, KV_HEADS, tokens, DIM), layer)
    return cache


def attend(cache: HybridCache, length: int, mask: torch.Tensor | None = None, layer: int = 0) -> torch.Tensor:
    """Attend with the queries of new tokens; return the output."""
    batch = cache.layers[layer].batch
    held = cache.update(*torch.randn(2, batch, KV_HEADS, length, DIM), layer)
    query = torch.randn(batch, HEADS, length, DIM)
    return scaled_dot_product_attention(query, *held, attn_mask=mask, enable_gqa=True)


def test_working_memory_is_that_of_the_largest_call_until_reset():
    lengths, alone = [1, 60, 7, 200, 33, 1], []
    for length in lengths:
        cache = filled(DynamicHybridCache(CONFIG), 1, 2000)
        assert cache.memory().working_bytes == 0
        attend(cache, length)
        alone.append(cache.memory().working_bytes)
    cache = filled(DynamicHybridCache(CONFIG), 1, 2000)
    for layer, length in enumerate(lengths):
        attend(cache, length, layer=layer % CONFIG.num_hidden_layers)
    assert 0 < cache.memory().working_bytes == max(alone)
    cache.reset()
    assert cache.memory().working_bytes == 0


@pytest.mark.parametrize("length", [1, 100])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["one", "continued"])
def test_mask_when_its_pass_is_over_then_nothing_keeps_it(kind: str, dtype: torch.dtype, length: int):
    cache = filled(QuantizedHybridCache(CONFIG, bits=8), 1, 400)
    if kind == "continued":
        cache.batch_repeat_interleave(3)
    batch, tokens = cache.layers[0].batch, 400 + length
    visible = torch.ones(batch, 1, length, tokens, dtype=torch.bool).tril(400)
    visible[0, :, :, 5:9] = False
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -100)
    for layer in range(CONFIG.num_hidden_layers):
        attend(cache, length, mask[:, :, :, :tokens], layer)
    kept = weakref.ref(mask.untyped_storage())
    del mask, visible
    assert kept() is None
