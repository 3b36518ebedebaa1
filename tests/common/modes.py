"""The ways to generate that every cache is held to. A new way is one function here."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LogitsProcessor, PreTrainedModel, set_seed
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from hf_hybrid_cache import HybridCache, PromptLookup
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.drafts import MOST_TOKENS

from common.caches import MakeCache
from models.tiny_models import random_prompt

# Prompts of 182 tokens then grow to 193, where a block is quantized and a split layer moves one to host memory.
NEW_TOKENS = 12
Result = list[Any]


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, **options: Any) -> Result:
    """Call `generate`, greedily by default; return tokens and logits."""
    ids = ids.to(model.device)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    output = model.generate(ids, **cache_argument(cache), return_dict_in_generate=True, output_logits=True, **options)
    return [output.sequences, torch.stack(output.logits)]


def answer(model: Any, ids: torch.Tensor, cache: Cache, **options: Any) -> Any:
    """Call `generate`, greedily and for eight tokens by default; return the prompt and the answer."""
    return model.generate(ids, **cache_argument(cache), **{"max_new_tokens": 8, "do_sample": False} | options)


@torch.no_grad()
def read(model: Any, ids: torch.Tensor, cache: Cache, **options: Any) -> torch.Tensor:
    """Let a model read tokens after those of a cache; return their logits."""
    logits: torch.Tensor = model(ids, **cache_argument(cache), **options).logits
    return logits


def way(batch: int, tokens: int, **fixed: Any) -> Callable[..., Result]:
    """Make a way to generate that is a call with a random prompt."""

    def run(model: PreTrainedModel, make_cache: MakeCache, more: int = 0, **options: Any) -> Result:
        set_seed(1)
        return generate(model, random_prompt(batch, tokens + more), make_cache(model.config), **fixed, **options)

    return run


class ListStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def greedy(model: PreTrainedModel, make_cache: MakeCache, more: int = 0, **options: Any) -> Result:
    listener = ListStreamer()
    return [*way(2, 40, streamer=listener)(model, make_cache, more, **options), listener.tokens]


def prompt_lookup(model: PreTrainedModel, make_cache: MakeCache, more: int = 0, **options: Any) -> Result:
    repetitive = random_prompt(1, 8).repeat(1, 5 + more // 8)
    return generate(model, repetitive, make_cache(model.config), prompt_lookup_num_tokens=4, **options)


class Copying(LogitsProcessor):
    """Makes an answer copy its prompt, which repeats 12 tokens or 8, but for every seventh token."""

    def __init__(self, period: int = 12):
        self._period = period

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        raised = scores.clone()  # those that came may be the logits that `generate` returns
        if input_ids.shape[1] % 7:
            raised[:, input_ids[0, -self._period]] += 30
        return raised  # type: ignore[return-value]


def lookup(max_tokens: int = MOST_TOKENS, forced: Any = None) -> PromptLookup:
    """Make what drafts wherever it can: by its clock, no pass takes any time."""
    return PromptLookup(max_tokens, forced=forced, clock=lambda: 0.0)


def drafts(model: PreTrainedModel, make_cache: MakeCache, more: int = 0, **options: Any) -> Result:
    """Draft with our caches, and decode one by one with others, where that does not round far otherwise."""
    cache, on_cpu = make_cache(model.config), options.pop("custom_generate", None)
    if isinstance(cache, HybridCache) or model.dtype == torch.bfloat16:
        options["custom_generate"] = lookup() if on_cpu is None else replace(on_cpu, drafts=lookup())
    repetitive = random_prompt(1, 8).repeat(1, 5 + more // 8)
    return generate(model, repetitive, cache, logits_processor=[Copying(8)], **options)


def assistant(model: PreTrainedModel, make_cache: MakeCache, more: int = 0, **options: Any) -> Result:
    return way(1, 30, assistant_model=similar_model(model))(model, make_cache, more, **options)


@functools.cache
def similar_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that agrees with `model` often, not always, so that guesses are both kept and rolled back."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in twin.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator).to(weight)
    return twin


def left_padding(model: PreTrainedModel, make_cache: MakeCache, more: int = 0, **options: Any) -> Result:
    ids = random_prompt(3, 30 + more)
    mask = torch.ones_like(ids)
    mask[0, :13], mask[1, :1] = 0, 0
    return generate(model, ids, make_cache(model.config), attention_mask=mask.to(model.device), **options)


def copied_prefix(model: PreTrainedModel, make_cache: MakeCache, more: int = 0, **options: Any) -> Result:
    """Ask two further questions after the first answer, each of a cache of its own; a short prompt is one token."""
    cache = make_cache(model.config)
    results = generate(model, random_prompt(2, 1 + more), cache, **options)
    text = results[0]
    for seed, each in ((1, copy.deepcopy(cache)), (2, cache)):
        ids = torch.cat([text, random_prompt(2, 30, seed).to(text.device)], dim=1)
        results += generate(model, ids, each, max_new_tokens=4, **options)
    return results


def continuations(model: PreTrainedModel, make_cache: MakeCache, more: int = 0, **options: Any) -> Result:
    """Beams for three questions, one of them shorter, about one text that is computed once."""
    text = random_prompt(1, 150 + more)
    cache = make_cache(model.config)
    with torch.no_grad():
        model(text.to(model.device), **cache_argument(cache))
    if isinstance(cache, HybridCache):
        cache.batch_repeat_interleave(6)
    else:  # transformers repeats no states of linear attention
        cache.reorder_cache(torch.zeros(6, dtype=torch.long, device=model.device))
    ids = torch.cat([text.expand(3, -1), random_prompt(3, 6, seed=1)], dim=1)
    mask = torch.ones_like(ids)
    mask[0, -6:-3] = 0
    return generate(model, ids, cache, attention_mask=mask.to(model.device), num_beams=2, **options)


# Each takes how many tokens more than usual the prompt has, and further options of `generate`.
MODES: dict[str, Callable[..., Result]] = {
    "greedy": greedy,
    "sampling": way(2, 30, do_sample=True, top_k=20, num_return_sequences=2),
    "beams": way(2, 30, num_beams=3, num_return_sequences=2),
    "prompt_lookup": prompt_lookup,
    "assistant": assistant,
    "drafts": drafts,
    "left_padding": left_padding,
    "chunked_prefill": way(2, 40, prefill_chunk_size=24),
    "copied_prefix": copied_prefix,
    "continuations": continuations,
}
# transformers refuses to roll back recurrent states.
NOT_IN_TRANSFORMERS = {("qwen3_next", "prompt_lookup"), ("qwen3_next", "assistant")}
# So many more tokens let blocks be quantized in the prefill, and others while tokens are decoded.
FOR_QUANTIZED_BLOCKS = 152


@contextmanager
def skipped_where_stock_fails() -> Iterator[None]:
    """Skip the test where transformers fails itself: before 5.23 in assisted decoding over sliding windows."""
    try:
        yield
    except RuntimeError as error:
        if Version(transformers.__version__) >= Version("5.23"):
            raise
        pytest.skip(f"transformers {transformers.__version__} fails here itself: {error}")
