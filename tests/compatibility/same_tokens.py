"""Caches that other libraries meet, and the tokens that a model generates with each."""

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache

from common.caches import MakeCache
from common.modes import answer
from models.tiny_models import random_prompt

CACHES: dict[str, MakeCache] = {
    "dynamic": DynamicHybridCache,
    "streamed": lambda config: OffloadedHybridCache(config, cpu_decode=False),
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
}
each_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


def prompt() -> torch.Tensor:
    return random_prompt(1, 150)


def generated(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    """Generate eight tokens after the prompt."""
    return answer(model, prompt(), cache)
