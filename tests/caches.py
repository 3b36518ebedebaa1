"""The caches that must behave like transformers' `DynamicCache`. A new cache is one row here."""

from collections.abc import Callable

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache


def num_full_attention_layers(config: PreTrainedConfig) -> int:
    return sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def stock(config: PreTrainedConfig) -> Cache:
    return DynamicCache(config=config)


def offloaded_partly(config: PreTrainedConfig) -> HybridCache:
    """Two layers ahead, and one that stays, where the model has one."""
    return OffloadedHybridCache(config, prefetch_layers=2, resident_layers=min(1, num_full_attention_layers(config)))


CACHES: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    "dynamic": DynamicHybridCache,
    "offloaded": OffloadedHybridCache,
    "offloaded_partly": offloaded_partly,
}
