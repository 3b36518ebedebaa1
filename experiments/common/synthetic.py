"""Caches filled with random keys and values, as a stand-in for a prefill that would take too long."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_hybrid_cache import DynamicHybridCache, HybridCache
from hf_hybrid_cache.models import load_config

CACHES: dict[str, Callable[[Any], Cache]] = {
    "stock": lambda config: DynamicCache(config=config),
    "ours": DynamicHybridCache,
}


def llama_1b_config(num_layers: int = 16) -> LlamaConfig:
    """The shape of Llama-3.2-1B, with fewer layers where one tells as much."""
    config = load_config("llama-3.2-1b-random")
    assert isinstance(config, LlamaConfig)
    config.num_hidden_layers = num_layers
    return config


def kv_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of KV heads of a layer, and their size."""
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_key_value_heads, head_dim


def random_states(config: PreTrainedConfig, num_tokens: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """States of one layer and one sequence, `[1, num_kv_heads, num_tokens, head_dim]`."""
    num_kv_heads, head_dim = kv_heads(config)
    return torch.randn(1, num_kv_heads, num_tokens, head_dim, device=device).to(dtype)


def fill(
    cache: Cache,
    config: PreTrainedConfig,
    num_tokens: int,
    dtype: torch.dtype,
    device: str = "cpu",
    chunk: int = 2048,
    batch: int = 1,
) -> None:
    """Append `num_tokens` random tokens to every layer, `chunk` at a time, the same to each of `batch` sequences."""
    torch.manual_seed(0)
    for start in range(0, num_tokens, chunk):
        states = random_states(config, min(chunk, num_tokens - start), dtype, device).repeat(batch, 1, 1, 1)
        for layer in range(config.get_text_config(decoder=True).num_hidden_layers):
            cache.update(states, states, layer)


def filled_cache(make: Callable[..., Cache], model: PreTrainedModel, num_tokens: int) -> Cache:
    """Make a cache for a model, with random keys and values of its type."""
    cache = make(model.config)
    fill(cache, model.config, num_tokens, model.dtype, chunk=8192)
    return cache


def kv_bytes(config: PreTrainedConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of `num_tokens` tokens in all layers."""
    num_kv_heads, head_dim = kv_heads(config)
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    return 2 * num_layers * num_kv_heads * head_dim * num_tokens * dtype.itemsize


def decode_states(
    config: LlamaConfig,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: HybridCache | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Return a random query for a decode step of one layer, and the handles that our cache returns.

    Args:
        config: of the layer.
        keys: [1, num_kv_heads, tokens, head_dim]; all but the last are put in as a prefill, the last is decoded.
        values: as the keys.
        cache: an empty one; a `DynamicHybridCache` if none is given.
    """
    cache = cache or DynamicHybridCache(config, cpu_decode=True)
    cache.update(keys[:, :, :-1], values[:, :, :-1], 0)
    query = torch.randn(1, config.num_attention_heads, 1, keys.shape[-1]).to(keys.dtype)
    return query, *cache.update(keys[:, :, -1:], values[:, :, -1:], 0)
