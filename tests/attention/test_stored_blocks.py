"""The record of stored tokens that the kernels read is kept while tokens come, go and move."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn.functional import scaled_dot_product_attention

from hf_hybrid_cache import DynamicHybridCache, HybridCache, Placement, QuantizedHybridCache

from common.soak import count, search_at_random
from models.tiny_models import llama

CONFIG = llama()
CACHES = {
    "full": lambda: DynamicHybridCache(CONFIG, cpu_decode=True),
    "codes": lambda: QuantizedHybridCache(CONFIG, bits=4, cpu_decode=True),
    "split": lambda: HybridCache(CONFIG, Placement(offload=True, cpu_decode=0.5, device_tokens=128)),
}


def attended(cache: HybridCache, tokens: int, batch: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, 2, tokens, 16, generator=generator) for _ in range(2))
    query = torch.randn(batch, 4, 1, 16, generator=generator)
    return scaled_dot_product_attention(query, *cache.update(keys, values, 0), enable_gqa=True)


@pytest.mark.parametrize("kind", CACHES)
@search_at_random(8)
@given(data=st.data())
def test_attention_when_history_is_random_then_is_that_of_a_copy(kind: str, data: st.DataObject):
    """A copy has a record of its own, which is written for it."""
    cache, batch = CACHES[kind](), 1
    for seed in range(data.draw(st.integers(1, 8))):
        length = cache.get_seq_length()
        change = data.draw(st.sampled_from(["add", "add", "remove", "repeat", "select", "reset"]))
        if change == "remove" and length > 1:
            cache.crop(-data.draw(st.sampled_from([1, 63, 64, 65, 200])) % -length)
        elif change == "repeat" and batch < 4:
            cache.batch_repeat_interleave(2)
            batch *= 2 if length else 1
        elif change == "select" and length:
            chosen = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4))
            cache.batch_select_indices(torch.tensor(chosen))
            batch = len(chosen)
        elif change == "reset":
            cache.reset()
            batch = 1
        attended(cache, data.draw(st.sampled_from([1, 2, 63, 64, 65, 130, 300])), batch, seed)
        twin = copy.deepcopy(cache)
        for step in range(2):
            assert torch.equal(*(attended(each, 1, batch, step) for each in (cache, twin)))
            count("attention compared with that of a copy")
