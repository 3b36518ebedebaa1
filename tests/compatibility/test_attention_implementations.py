"""Every implementation of attention that runs on a CPU gives the same tokens with our caches as with stock's."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_cache import DynamicHybridCache

from .same_tokens import CACHES, generated
from common.caches import stock
from common.slow import slow
from models.tiny_models import tiny_model

IMPLEMENTATIONS = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()), "of_ones_own"]
kinds: set[type] = set()


def attend(_: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **__: Any) -> tuple:
    """Attention that a user writes, which notes what it gets."""
    kinds.update((type(key), type(value)))
    out = scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers' own
# Flex attention is compiled, which takes seconds.
@pytest.mark.parametrize("name", [slow(name) if name == "flex_attention" else name for name in IMPLEMENTATIONS])
def test_an_implementation_of_attention_gets_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of_ones_own", attend)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "of_ones_own", sdpa_mask)
    kinds.clear()
    model = copy.deepcopy(tiny_model("llama"))
    try:
        model.set_attn_implementation(name)
        expected = generated(model, stock(model.config))
    except Exception as error:
        assert name != "of_ones_own"
        pytest.skip(f"transformers' own cache fails here too: {type(error).__name__}: {str(error)[:100]}")
    for make in (*CACHES.values(), lambda config: DynamicHybridCache(config, cpu_decode=True)):
        assert torch.equal(generated(model, make(model.config)), expected)
    assert kinds == ({torch.Tensor} if name == "of_ones_own" else set())
