"""Caches that other libraries meet, and the tokens that a model generates with each."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from models.tiny_models import random_prompt

MakeCache = Callable[[PreTrainedConfig], Cache]
CACHES: dict[str, MakeCache] = {
    "dynamic": DynamicHybridCache,
    "streamed": lambda config: OffloadedHybridCache(config, cpu_decode=False),
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
}
each_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


def stock_cache(config: PreTrainedConfig) -> Cache:
    return DynamicCache(config=config)


def prompt() -> torch.Tensor:
    return random_prompt(1, 150)


def generated(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    """Generate eight tokens after the prompt."""
    return model.generate(prompt(), **cache_argument(cache), max_new_tokens=8, do_sample=False)
