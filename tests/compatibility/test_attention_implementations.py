"""Every implementation of attention that runs on a CPU gives the same tokens with our caches as with stock's."""

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_cache import DynamicHybridCache

from .same_tokens import CACHES as SOME_CACHES
from .same_tokens import generated, stock_cache
from common.slow import slow
from models.tiny_models import tiny_model

CACHES = [*SOME_CACHES.values(), lambda config: DynamicHybridCache(config, cpu_decode=True)]
IMPLEMENTATIONS = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())]


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
        expected = generated(model, stock_cache(model.config))
    except Exception as error:
        pytest.skip(f"transformers' own cache fails here too: {type(error).__name__}: {str(error)[:100]}")
    for make in CACHES:
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
        expected = generated(model, stock_cache(model.config))
        for make in CACHES:
            assert torch.equal(generated(model, make(model.config)), expected)
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["of_ones_own"]
        del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping["of_ones_own"]
    assert kinds == {torch.Tensor}
