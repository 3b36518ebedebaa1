"""Every implementation of attention that runs on a CPU gives the same tokens with our caches as with stock's."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from common.slow import slow
from models.tiny_models import random_prompt, tiny_model

CACHES: dict[str, Callable[[PreTrainedConfig], Cache]] = {
    "dynamic": DynamicHybridCache,
    "cpu_decode": lambda config: DynamicHybridCache(config, cpu_decode=True),
    "streamed": lambda config: OffloadedHybridCache(config, cpu_decode=False),
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
}
IMPLEMENTATIONS = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())]


def generated(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    return model.generate(random_prompt(1, 150), **cache_argument(cache), max_new_tokens=6, do_sample=False)


@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers' own
@pytest.mark.parametrize(
    "name",
    # Flex attention is compiled, which takes seconds.
    [slow(name) if name == "flex_attention" else name for name in IMPLEMENTATIONS],
)
def test_an_implementation_of_attention_gets_what_it_needs(name: str):
    model = copy.deepcopy(tiny_model("llama"))
    try:
        model.set_attn_implementation(name)
        expected = generated(model, DynamicCache(config=model.config))
    except Exception as error:
        pytest.skip(f"transformers' own cache fails here too: {type(error).__name__}: {str(error)[:100]}")
    for make in CACHES.values():
        assert torch.equal(generated(model, make(model.config)), expected)


@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
def test_an_implementation_of_ones_own_gets_the_states():
    model = copy.deepcopy(tiny_model("llama"))
    kinds = set()

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        kinds.update((type(key), type(value)))
        out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("of_ones_own", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("of_ones_own", sdpa_mask)
    try:
        model.set_attn_implementation("of_ones_own")
        expected = generated(model, DynamicCache(config=model.config))
        for make in CACHES.values():
            assert torch.equal(generated(model, make(model.config)), expected)
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["of_ones_own"]
        del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping["of_ones_own"]
    assert kinds == {torch.Tensor}
