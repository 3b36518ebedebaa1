"""Chunks after the first one: what a token sees, and so every bit, does not depend on where a prompt is cut."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache, minmax
from hf_hybrid_cache.cache import contents_of
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.prefill_chunks import FEWEST_TOKENS_OF_SAME_BITS
from hf_hybrid_cache.storage import Store

from common.soak import count, search_at_random
from models.tiny_models import random_prompt, tiny_model

CONFIG = LlamaConfig(num_hidden_layers=1)
CACHES: dict[str, Callable[[Any], HybridCache]] = {
    "full": DynamicHybridCache,
    "8": lambda config: QuantizedHybridCache(config, 8),
    "4": lambda config: QuantizedHybridCache(config, 4),
    "2": lambda config: QuantizedHybridCache(config, 2),
    "8_and_4": lambda config: QuantizedHybridCache(config, (8, 4)),
    "4_without_sinks": lambda config: HybridCache(config, codec=minmax(4, sink_tokens=0)),
    "4_with_more_sinks": lambda config: HybridCache(config, codec=minmax(4, sink_tokens=192)),
}
QUANTIZED = [name for name in CACHES if name != "full"]
MASKS = ["causal", "left_padding", "holes", "bias"]
# Relative to the largest value, see test_chunk_attention.
BOUND = 4e-6


class Prompt(NamedTuple):
    """Queries, keys, values `[batch, heads, tokens, head_dim]`, and which tokens each query sees."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def random(
        cls, tokens: int, dtype: torch.dtype, mask: str, heads: tuple[int, int] = (9, 3), dim: int = 64, seed: int = 0
    ) -> "Prompt":
        generator = torch.Generator().manual_seed(seed)

        def states(num_heads: int) -> torch.Tensor:
            return torch.randn(2, num_heads, tokens, dim, generator=generator).to(dtype)

        seen = torch.ones(2, 1, tokens, tokens, dtype=torch.bool).tril()
        if mask == "left_padding":
            seen[1, :, :, : tokens // 3] = False
        elif mask == "holes":
            hidden = torch.rand(seen.shape, generator=generator) < 0.2
            seen &= ~hidden | torch.eye(tokens, dtype=torch.bool)
        elif mask == "bias":
            bias = torch.randn(seen.shape, generator=generator).to(dtype)
            seen = bias.masked_fill(~seen, -torch.inf)
        return cls(states(heads[0]), states(heads[1]), states(heads[1]), seen)


def new_cache(name: str, config: LlamaConfig) -> HybridCache:
    """Make a cache whose tokens see codes as if they came one by one."""
    cache = CACHES[name](config)
    contents_of(cache).stores.sees_as_alone = True
    return cache


def read_in_chunks(cache: HybridCache, prompt: Prompt, ends: Sequence[int], removed: int = 0) -> torch.Tensor:
    """Attend in chunks that end at `ends`; so many tokens are removed after the first chunk, and come again."""
    outs, start = [], 0
    for end in ends:
        now = slice(start, end)
        keys, values = cache.update(prompt.keys[:, :, now], prompt.values[:, :, now], 0)
        mask = prompt.mask[:, :, now, :end]
        outs.append(scaled_dot_product_attention(prompt.queries[:, :, now], keys, values, mask, enable_gqa=True))
        start = end
        if removed and len(outs) == 1:
            cache.crop(-removed)
            start -= removed
            outs = [outs[0][:, :, :start]]
    return torch.cat(outs, dim=2)


def stored(cache: HybridCache) -> list[torch.Tensor]:
    """Keys and values as they are stored, codes too."""
    store = cache.layers[0].store
    assert isinstance(store, Store)
    packed = () if store.packed is None else store.packed.read()
    return [*store.dense.read(), *packed]


def test_chunks_when_around_2048_tokens_then_have_same_bits():
    prompt = Prompt.random(2400, torch.bfloat16, "causal", (3, 1))
    outs = [read_in_chunks(new_cache("4", CONFIG), prompt, [1024, *cuts, 2400]) for cuts in ([], [2047], [2049, 2176])]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.soak
@pytest.mark.parametrize("name", CACHES)
@search_at_random(40, 300)
@given(data=st.data())
def test_chunks_when_cut_anywhere_then_have_same_bits(name: str, data: st.DataObject):
    """Also where tokens are removed after the first chunk, and come again."""
    draw, mask = data.draw, data.draw(st.sampled_from(MASKS))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    kv_heads, group, dim = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.sampled_from([16, 24, 64]))
    least = FEWEST_TOKENS_OF_SAME_BITS
    first, sizes = draw(st.integers(330, 500)), st.integers(least, 2 * least) | st.sampled_from([127, 128, 129, 192])
    chunks = draw(st.lists(sizes, min_size=1, max_size=5))
    *cuts, end = np.cumsum([first, *chunks, draw(st.integers(least, 200))]).tolist()[1:]
    prompt = Prompt.random(end, dtype, mask, (kv_heads * group, kv_heads), dim, draw(st.integers(0, 2**32 - 1)))
    removed = draw(st.sampled_from([0, 0, 1, 64, 70, 100, 130, 140]))
    whole, cut = (new_cache(name, CONFIG) for _ in range(2))
    expected = read_in_chunks(whole, prompt, [first, end], removed)
    assert torch.equal(read_in_chunks(cut, prompt, [first, *cuts, end], removed), expected)
    assert all(torch.equal(*each) for each in zip(stored(cut), stored(whole), strict=True))
    count("cuts of a prompt compared")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("first", [1, 63, 70, 150, 320])
def test_later_chunk_when_compared_with_float64_then_follows_borders(name: str, mask: str, first: int):
    prompt = Prompt.random(620, torch.float32, mask, (4, 2), 16)
    cache = new_cache(name, CONFIG)
    out = read_in_chunks(cache, prompt, [first, first + 80, 620])[:, :, first:]  # some chunks end within the sinks
    store = cache.layers[0].store
    decoded = [states.double() for states in store.read()]
    sinks, rows = store.layout.sink_tokens, torch.arange(first, 620)
    # A block is quantized once 64 tokens have come after it.
    ends = sinks + ((rows + 1 - sinks - 64) // 64).clamp_min(0) * 64
    in_codes = torch.arange(620) < ends[:, None]
    queries = prompt.queries[:, :, first:].double()
    states = [decoded, [prompt.keys.double(), prompt.values.double()]]
    scores = [queries @ keys.repeat_interleave(2, dim=1).mT / 4 for keys, _ in states]
    mask_of_rows = prompt.mask[:, :, first:]
    bias = mask_of_rows if mask == "bias" else torch.zeros(()).masked_fill(~mask_of_rows, -torch.inf)
    weights = (torch.where(in_codes, *scores) + bias).softmax(-1).nan_to_num(0)
    of_codes, of_others = (values.repeat_interleave(2, dim=1) for _, values in states)
    expected = weights * in_codes @ of_codes + weights * ~in_codes @ of_others
    assert (in_codes & (torch.arange(620) >= sinks)).any()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=BOUND * float(prompt.values.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["full", "4", "8_and_4"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_model_when_prompt_is_cut_anywhere_then_has_same_bits(name: str, dtype: torch.dtype, is_padded: bool):
    model, ids = tiny_model("llama", dtype), random_prompt(2, 500)
    attention_mask = torch.ones_like(ids)
    if is_padded:
        attention_mask[1, :90] = 0
    least, results = FEWEST_TOKENS_OF_SAME_BITS, []
    for cuts in ([], [200 + least], [351], [499 - least]):
        cache = new_cache(name, model.config)
        for start, end in pairwise([0, 200, *cuts, 499, 500]):
            with torch.no_grad():
                logits = model(
                    ids[:, start:end], attention_mask=attention_mask[:, :end], **cache_argument(cache)
                ).logits
        results.append([logits, *(states for layer in cache.layers for states in (layer.keys, layer.values))])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
