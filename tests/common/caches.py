"""The caches that must behave like transformers' `DynamicCache`. A new cache is one row here."""

from collections.abc import Callable

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    KVCodec,
    OffloadedHybridCache,
    Placement,
    minmax,
)
from hf_hybrid_cache.cache_argument import cache_argument

from common.channel_scaled import channel_scaled
from common.quantized_reference import quantized_reference


def full_attention_layers(config: PreTrainedConfig) -> list[int]:
    return [index for index, layer in enumerate(DynamicCache(config=config).layers) if type(layer) is DynamicLayer]


def num_full_attention_layers(config: PreTrainedConfig) -> int:
    return len(full_attention_layers(config))


def stock(config: PreTrainedConfig) -> Cache:
    return DynamicCache(config=config)


def dynamic(config: PreTrainedConfig) -> HybridCache:
    return DynamicHybridCache(config, cpu_decode=False)


def offloaded(config: PreTrainedConfig) -> HybridCache:
    return OffloadedHybridCache(config, cpu_decode=False)


def offloaded_partly(config: PreTrainedConfig) -> HybridCache:
    """Stream with two layers of prefetch, and one resident layer if the model has several."""
    resident_layers = min(1, num_full_attention_layers(config))
    return OffloadedHybridCache(config, prefetch_layers=2, resident_layers=resident_layers, cpu_decode=False)


def cpu_decode_partly(config: PreTrainedConfig) -> HybridCache:
    """The last full-attention layer on the CPU, the others streamed."""
    return HybridCache(config, Placement(offload=True, cpu_decode=full_attention_layers(config)[-1:]))


def shared_with_nobody(config: PreTrainedConfig) -> HybridCache:
    return DynamicHybridCache(config, group=group_of_one())


def group_of_one() -> "distributed.ProcessGroup | None":
    """Return a group of this process alone; `None` where this torch has no groups."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        return None
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return distributed.group.WORLD


# Attention is torch's own: results are those of `DynamicCache` to the last bit.
SAME_ATTENTION: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    "dynamic": dynamic,
    "offloaded": offloaded,
    "offloaded_partly": offloaded_partly,
}
# Attention is the kernel's: results differ by rounding.
OWN_ATTENTION: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    "default": DynamicHybridCache,
    "cpu_decode_partly": cpu_decode_partly,
    "shared_with_nobody": shared_with_nobody,
}
# Both ends of the context on the device, the middle in host memory, attended to by the kernel, streamed, or half of it.
SPLIT: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    "split": lambda config: OffloadedHybridCache(config, device_tokens=128, cpu_decode=True),
    "split_streamed": lambda config: OffloadedHybridCache(config, device_tokens=128, cpu_decode=False),
    "split_in_three": lambda config: OffloadedHybridCache(
        config, device_tokens=128, cpu_decode=0.5, resident_layers=int(num_full_attention_layers(config) > 1)
    ),
}
CACHES = SAME_ATTENTION | OWN_ATTENTION | SPLIT


def quantized_last_layers(config: PreTrainedConfig) -> HybridCache:
    """The first layer of full attention stays in full precision, the last has more bits than those between."""
    return HybridCache(config, codec=codecs_of_last_layers(config))


def codecs_of_last_layers(config: PreTrainedConfig) -> dict[int, KVCodec]:
    layers = full_attention_layers(config)
    bits = {index: (8 if index == layers[-1] else (4, 2)) for index in layers[1:]}
    return {index: minmax(each, sink_tokens=0, rotate=True) for index, each in bits.items()}


def channel_scaled_codecs(config: PreTrainedConfig, bits: int) -> dict[int, KVCodec]:
    """Layers of full attention, each channel-scaled in its own way."""
    return {index: channel_scaled(minmax(bits), *sizes, seed=index) for index, sizes in kv_sizes(config).items()}


def kv_sizes(config: PreTrainedConfig) -> dict[int, tuple[int, int, int]]:
    """KV heads, and the width of a key and of a value, of each layer of full attention that stores any."""
    key = config.to_json_string()
    if key not in _KV_SIZES:
        cache = DynamicCache(config=config)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            AutoModelForCausalLM.from_config(config)(torch.ones(1, 1, dtype=torch.long), **cache_argument(cache))
        _KV_SIZES[key] = {
            index: (
                cache.layers[index].keys.shape[1],
                cache.layers[index].keys.shape[3],
                cache.layers[index].values.shape[3],
            )
            for index in full_attention_layers(config)
            if cache.layers[index].is_initialized
        }
    return _KV_SIZES[key]


_KV_SIZES: dict[str, dict[int, tuple[int, int, int]]] = {}


# Each beside the same codes in a plain cache. Attention is torch's own: results are the same to the last bit.
QUANTIZED_SAME_ATTENTION: dict[str, tuple[Callable[[PreTrainedConfig], Cache], Callable[[PreTrainedConfig], Cache]]] = {
    "quantized_on_device": (
        lambda config: HybridCache(config, Placement(cpu_decode=False), codec=minmax(4, sink_tokens=0, rotate=True)),
        lambda config: quantized_reference(config, minmax(4, sink_tokens=0, rotate=True)),
    ),
    "quantized_balanced_on_device": (
        lambda config: HybridCache(config, Placement(cpu_decode=False), codec=channel_scaled_codecs(config, 4)),
        lambda config: quantized_reference(config, channel_scaled_codecs(config, 4)),
    ),
    "quantized_streamed": (
        lambda config: HybridCache(
            config, Placement(offload=True, cpu_decode=False), codec=minmax((8, 4), rotate=False)
        ),
        lambda config: quantized_reference(config, minmax((8, 4), rotate=False)),
    ),
}
# Attention is the kernel's, over the codes.
QUANTIZED_OWN_ATTENTION: dict[str, tuple[Callable[[PreTrainedConfig], Cache], Callable[[PreTrainedConfig], Cache]]] = {
    "quantized_4": (
        lambda config: HybridCache(config, codec=minmax(4, rotate=True)),
        lambda config: quantized_reference(config, minmax(4, rotate=True)),
    ),
    "quantized_8": (
        lambda config: HybridCache(config, codec=minmax(8, rotate=True)),
        lambda config: quantized_reference(config, minmax(8, rotate=True)),
    ),
    "quantized_2": (
        lambda config: HybridCache(
            config, Placement(cpu_decode=True), codec=minmax(2, group_size=16, sink_tokens=0, rotate=True)
        ),
        lambda config: quantized_reference(config, minmax(2, group_size=16, sink_tokens=0, rotate=True)),
    ),
    "quantized_balanced": (
        lambda config: HybridCache(config, codec=channel_scaled_codecs(config, 8)),
        lambda config: quantized_reference(config, channel_scaled_codecs(config, 8)),
    ),
    "quantized_shared_with_nobody": (
        lambda config: HybridCache(config, codec=minmax(8, sink_tokens=0, rotate=True), group=group_of_one()),
        lambda config: quantized_reference(config, minmax(8, sink_tokens=0, rotate=True)),
    ),
    "quantized_split": (
        lambda config: HybridCache(config, Placement(cpu_decode=True, device_tokens=128), codec=minmax(8, rotate=True)),
        lambda config: quantized_reference(config, minmax(8, rotate=True), device_tokens=128),
    ),
    "quantized_split_streamed": (
        lambda config: HybridCache(
            config,
            Placement(offload=True, cpu_decode=False, device_tokens=128),
            codec=minmax(4, sink_tokens=0, rotate=True),
        ),
        lambda config: quantized_reference(config, minmax(4, sink_tokens=0, rotate=True), device_tokens=128),
    ),
    "quantized_split_in_three": (
        lambda config: HybridCache(
            config,
            Placement(offload=True, cpu_decode=0.5, device_tokens=128),
            codec=minmax(8, sink_tokens=0, rotate=True),
        ),
        lambda config: quantized_reference(config, minmax(8, sink_tokens=0, rotate=True), device_tokens=128),
    ),
    "quantized_last_layers": (
        quantized_last_layers,
        lambda config: quantized_reference(config, codecs_of_last_layers(config)),
    ),
}
QUANTIZED = QUANTIZED_SAME_ATTENTION | QUANTIZED_OWN_ATTENTION
