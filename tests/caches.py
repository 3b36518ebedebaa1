"""The caches that must behave like transformers' `DynamicCache`. A new cache is one row here."""

from collections.abc import Callable

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache


def num_full_attention_layers(config: PreTrainedConfig) -> int:
    return sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def stock(config: PreTrainedConfig) -> Cache:
    return DynamicCache(config=config)


def dynamic(config: PreTrainedConfig) -> HybridCache:
    return DynamicHybridCache(config, cpu_decode=False)


def offloaded(config: PreTrainedConfig) -> HybridCache:
    return OffloadedHybridCache(config, cpu_decode=False)


def offloaded_partly(config: PreTrainedConfig) -> HybridCache:
    """Two layers ahead, and one that stays, where the model has one."""
    resident_layers = min(1, num_full_attention_layers(config))
    return OffloadedHybridCache(config, prefetch_layers=2, resident_layers=resident_layers, cpu_decode=False)


def cpu_decode(config: PreTrainedConfig) -> HybridCache:
    return DynamicHybridCache(config, cpu_decode=True)


def cpu_decode_partly(config: PreTrainedConfig) -> HybridCache:
    """The last full-attention layer on the CPU, the others streamed."""
    layers = [index for index, layer in enumerate(DynamicCache(config=config).layers) if type(layer) is DynamicLayer]
    return OffloadedHybridCache(config, cpu_decode=layers[-1:])


# Attention is torch's own: results are those of `DynamicCache` to the last bit.
SAME_ATTENTION: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    "dynamic": dynamic,
    "offloaded": offloaded,
    "offloaded_partly": offloaded_partly,
}
# Attention is the kernel's: results differ by rounding.
OWN_ATTENTION: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    "default": DynamicHybridCache,
    "cpu_decode": cpu_decode,
    "cpu_decode_partly": cpu_decode_partly,
}
CACHES = SAME_ATTENTION | OWN_ATTENTION
