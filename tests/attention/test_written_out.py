"""Attention that is written out operation by operation, against the same operations on tensors."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import repeat_kv

from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache, StaleHandleError
from hf_hybrid_cache.attention.scores import Scores
from hf_hybrid_cache.cache_argument import cache_argument

from common.caches import OWN_ATTENTION, SAME_ATTENTION, MakeCache
from common.soak import search_at_random
from models.tiny_models import random_prompt

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16
CONFIG = LlamaConfig(
    num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=64, vocab_size=8
)
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": HEAD_DIM}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "layer_types": ["full_attention"] * 2}
CONFIGS = {
    "soft caps": lambda: Gemma2Config(**SIZES, attn_logit_softcapping=2.0, query_pre_attn_scalar=1),
    "sinks": lambda: GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
WARNING = "Attention asks for the keys and values"
# What a model may do to scores; `of` makes tensors of a shape that the scores have, or may be spread to it.
Operation = Callable[[torch.Tensor, Callable[..., torch.Tensor]], torch.Tensor]
KNOWN: dict[str, Operation] = {
    "times a number": lambda scores, of: scores * 0.25,
    "a number times": lambda scores, of: 0.5 * scores,
    "divided": lambda scores, of: scores / 3.0,
    "capped": lambda scores, of: torch.tanh(scores / 2.0) * 2.0,
    "masked": lambda scores, of: scores + of(BATCH, 1, 1, -1),
    "bias of heads": lambda scores, of: of(HEADS, 1, -1) + scores,
    "minus the highest": lambda scores, of: scores - scores.max(dim=-1, keepdim=True).values,
    "minus the largest": lambda scores, of: scores - scores.amax(-1, keepdim=True),
    "of a type": lambda scores, of: scores.to(torch.float32).float(),
}
SHIFTS = ("minus the highest", "minus the largest")
UNKNOWN: dict[str, Operation] = {
    "in place": lambda scores, of: scores.mul_(0.5),
    "squared": lambda scores, of: scores * scores / 8,
    "plus a number": lambda scores, of: scores + 1.0,
    "one by one": lambda scores, of: scores * of(BATCH, HEADS, 1, -1),
    "hidden": lambda scores, of: scores.masked_fill(of(BATCH, 1, 1, -1) > 1, -3.0),
    "minus others": lambda scores, of: scores - (scores * 0.5).amax(-1, keepdim=True),
    "masked twice": lambda scores, of: torch.add(scores, of(BATCH, 1, 1, -1), alpha=2),
    "the larger": lambda scores, of: torch.max(scores, of(BATCH, HEADS, 1, -1)),
    "the highest of all": lambda scores, of: scores - scores.max(),
    "a copy": lambda scores, of: scores.to(torch.float32, copy=True) * 1.0,
    "some": lambda scores, of: scores + scores[..., [0, 1]].sum(-1, keepdim=True) / 8,
    "in float64": lambda scores, of: torch.softmax(scores, -1, torch.float64).float(),
    "tanh of all": lambda scores, of: torch.tanh(scores + of(BATCH, 1, 1, -1)),
}


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, names: list[str], sinks: bool, seed: int
) -> Any:
    """Return the result of attention, and the weights."""
    generator = torch.Generator().manual_seed(seed)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn([keys.shape[2] if size == -1 else size for size in shape], generator=generator)

    scores = torch.matmul(query, repeat_kv(keys, HEADS // KV_HEADS).transpose(2, 3)) * 0.25
    for name in names:
        scores = (KNOWN | UNKNOWN)[name](scores, of)
    if sinks:
        column = of(1, HEADS, 1, 1).expand(BATCH, -1, query.shape[2], -1)
        weights = functional.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=0.5, training=False)
    return torch.matmul(weights, repeat_kv(values, HEADS // KV_HEADS)), weights


@search_at_random(60)
@given(
    tokens=st.sampled_from([3, 63, 64, 65, 129, 200]),
    new=st.sampled_from([1, 2, 16, 65]),
    names=st.lists(st.sampled_from([*KNOWN, *KNOWN, *UNKNOWN]), max_size=5),
    sinks=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_operations_give_what_they_give_on_tensors(tokens: int, new: int, names: list[str], sinks: bool, seed: int):
    generator = torch.Generator().manual_seed(seed)
    past, states = (
        [torch.randn(BATCH, KV_HEADS, n, HEAD_DIM, generator=generator) for _ in range(2)] for n in (tokens, new)
    )
    query = torch.randn(BATCH, HEADS, new, HEAD_DIM, generator=generator)
    results = []
    for cache in (DynamicHybridCache(CONFIG, cpu_decode=True), DynamicCache(config=CONFIG)):
        cache.update(*past, 0)
        with warnings.catch_warnings():
            is_known = _is_attention(names, sinks)
            warnings.filterwarnings("error" if is_known else "ignore", message=WARNING)
            results.append(attend(query, *cache.update(*states, 0), names, sinks, seed))
            if is_known and isinstance(cache, HybridCache):
                assert isinstance(results[0][1], Scores)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=WARNING)
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours + 0, theirs, rtol=2e-5, atol=2e-5)


def _is_attention(names: list[str], sinks: bool) -> bool:
    """Return whether operations are known, and are attention in their order."""
    last = [index for index, name in enumerate(names) if name in ("masked", "bias of heads", *SHIFTS)]
    products = {"times a number", "a number times", "divided", "capped"}
    has_late_product = bool(last) and not products.isdisjoint(names[last[0] :])
    has_late_sinks = sinks and not set(SHIFTS).isdisjoint(names)
    return set(names) <= KNOWN.keys() and names.count("capped") < 2 and not (has_late_product or has_late_sinks)


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    for layer in model.model.layers:
        if name == "sinks":
            torch.nn.init.normal_(layer.self_attn.sinks, std=2)
    return model


@pytest.mark.parametrize("make", {**SAME_ATTENTION, **OWN_ATTENTION}.values(), ids={**SAME_ATTENTION, **OWN_ATTENTION})
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_with_caps_or_sinks_computes_what_it_does_with_stock(name: str, make: MakeCache):
    """Chunks of many and few tokens, one by one, with padding on the left."""
    model, ids, results = model_of(name), random_prompt(2, 210), []
    seen = torch.ones_like(ids)
    seen[0, :37] = 0
    for cache in (make(model.config), DynamicCache(config=model.config)):
        cuts, logits = (0, 130, 131, 132, 137, 210), []
        with torch.no_grad():
            for start, end in itertools.pairwise(cuts):
                given = {"input_ids": ids[:, start:end], "attention_mask": seen[:, :end]}
                logits.append(model(**given, **cache_argument(cache), use_cache=True).logits)
        results.append(torch.cat(logits, dim=1))
    ours, theirs = results
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[0, 37:], theirs[0, 37:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_with_caps_or_sinks_are_attended_to_as_they_are_read(name: str, bits: int, exact_kernels):
    """The kernels on codes, and eager attention to the tensors that the same cache returns otherwise."""
    model, results = model_of(name), []
    for cpu_decode in (True, False):
        cache = QuantizedHybridCache(model.config, bits=bits, cpu_decode=cpu_decode)
        with torch.no_grad():
            ids = random_prompt(1, 303)
            model(ids[:, :300], **cache_argument(cache), use_cache=True)
            states = model(ids[:, 300:], **cache_argument(cache), use_cache=True, output_hidden_states=True)
        results.append(states.hidden_states[1])  # after one layer: experts would take leaps at the next
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_continuations_of_a_prompt_have_caps_and_sinks_once(name: str):
    model, ids = model_of(name), random_prompt(1, 150)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    expected = model.generate(ids, **cache_argument(DynamicCache(config=model.config)), **options)
    assert torch.equal(model.generate(ids, **cache_argument(DynamicHybridCache(model.config)), **options), expected)


def test_what_is_written_to_before_the_values_come_is_an_error():
    cache, query = DynamicHybridCache(CONFIG, cpu_decode=True), torch.ones(BATCH, HEADS, 1, HEAD_DIM)
    states = [torch.ones(BATCH, KV_HEADS, 65, HEAD_DIM) for _ in range(2)]
    cache.update(*states, 0)
    keys, values = (repeat_kv(handle, 2) for handle in cache.update(*(each[:, :, :1] for each in states), 0))
    mask = torch.zeros(BATCH, 1, 1, 66)
    for written in (query, mask):
        weights = functional.softmax(query @ keys.transpose(2, 3) + mask, dim=-1)
        written.add_(1)
        for use in (lambda weights: weights @ values, lambda weights: weights + 0):
            with pytest.raises(StaleHandleError, match="written to before"):
                use(weights)


@pytest.mark.filterwarnings(f"ignore:{WARNING}")
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_that_somebody_keeps_are_those_of_stock(name: str):
    model, ids = model_of(name), random_prompt(1, 70)
    options = {"max_new_tokens": 4, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    ours, theirs = (
        model.generate(ids, **cache_argument(cache), **options)
        for cache in (DynamicHybridCache(model.config, cpu_decode=True), DynamicCache(config=model.config))
    )
    for step, expected in zip(ours.attentions, theirs.attentions, strict=True):
        for weights, wanted in zip(step, expected, strict=True):
            torch.testing.assert_close(weights + 0, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings(f"ignore:{WARNING}")
@torch.no_grad()
def test_weights_when_kept_over_a_reset_then_the_next_prompt_is_read():
    model, ids = model_of("soft caps"), random_prompt(1, 70)
    cache = DynamicHybridCache(model.config, cpu_decode=True)
    first = model(ids, **cache_argument(cache), output_attentions=True)
    cache.reset()
    assert torch.equal(model(ids, **cache_argument(cache)).logits, first.logits)
    with pytest.raises(StaleHandleError):
        first.attentions[-1].sum()
