"""Processes of a group whose model is on an accelerator."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from hf_hybrid_cache import DynamicHybridCache

from accelerator.orders import sent
from common.caches import group_of_one


@pytest.mark.skipif(group_of_one() is None, reason="this torch has no gloo")
def test_many_queries_of_one_process_attend_to_tokens_before_them():
    cache, generator = DynamicHybridCache(LlamaConfig(num_hidden_layers=1), group=group_of_one()), torch.Generator()
    states = [torch.randn(1, 1, 128, 4, generator=generator) for _ in range(2)]
    query = torch.randn(1, 1, 65, 4, generator=generator)
    cache.update(*(sent(each[:, :, :63]) for each in states), 0)
    handles = cache.update(*(sent(each[:, :, 63:]) for each in states), 0)
    attended = scaled_dot_product_attention(sent(query), *handles)
    torch.testing.assert_close(attended.cpu(), scaled_dot_product_attention(query, *states), rtol=1e-5, atol=1e-5)
