"""Models in float64 and under autocast: every cache answers as stock's, or refuses with a reason."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from hf_hybrid_cache import HybridCache, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from common.caches import CACHES
from models.tiny_models import random_prompt, tiny_model

QUANTIZED = {
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
    "8 bits streamed": lambda config: QuantizedHybridCache(config, bits=8, offload=True, cpu_decode=False),
    "8 bits split": lambda config: QuantizedHybridCache(config, bits=8, offload=True, device_tokens=128),
}
ALL: dict[str, Callable[[PreTrainedConfig], HybridCache]] = CACHES | QUANTIZED
# A share, or attention on the CPU that was asked for, needs one type that there is a kernel for.
ASK_FOR_A_KERNEL = {"cpu_decode_partly", "shared_with_nobody", "split", "split_in_three"}


def last_logits(make: Callable[[PreTrainedConfig], Cache], dtype: torch.dtype) -> torch.Tensor:
    """Return the last logits of a prompt, some tokens and a step, beyond what stays on the device."""
    model = tiny_model("llama", dtype)
    cache = make(model.config)
    with torch.no_grad():
        for tokens in (200, 5, 1):
            logits = model(random_prompt(2, tokens, seed=tokens), **cache_argument(cache), logits_to_keep=1).logits
    return logits


def require_as_stock(name: str, dtype: torch.dtype, tolerance: float) -> None:
    expected = last_logits(lambda config: DynamicCache(config=config), dtype)
    try:
        logits = last_logits(ALL[name], dtype)
    except ValueError as error:
        assert name in ASK_FOR_A_KERNEL
        assert "or pass cpu_decode=False" in str(error) or "group=" in str(error)  # noqa: PT017
        return
    assert logits.dtype == expected.dtype
    assert (logits - expected).abs().max() < tolerance


@pytest.mark.parametrize("name", ALL)
def test_model_in_float64_then_answers_as_stock(name: str):
    require_as_stock(name, torch.float64, 0.3 if name in QUANTIZED else 1e-4)


@pytest.mark.parametrize("name", ALL)
def test_model_under_autocast_then_answers_as_stock(name: str):
    with torch.autocast("cpu", torch.bfloat16):
        require_as_stock(name, torch.float32, 0.3)
