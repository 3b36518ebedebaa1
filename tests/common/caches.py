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
    QuantizedHybridCache,
    minmax,
)
from hf_hybrid_cache.cache_argument import cache_argument

from common.channel_scaled import channel_scaled
from common.quantized_reference import quantized_reference

MakeCache = Callable[[PreTrainedConfig], Cache]


def full_attention_layers(config: PreTrainedConfig) -> list[int]:
    return [index for index, layer in enumerate(DynamicCache(config=config).layers) if type(layer) is DynamicLayer]


def stock(config: PreTrainedConfig) -> Cache:
    return DynamicCache(config=config)


def dynamic(config: PreTrainedConfig) -> HybridCache:
    return DynamicHybridCache(config, cpu_decode=False)


def offloaded(config: PreTrainedConfig) -> HybridCache:
    return OffloadedHybridCache(config, cpu_decode=False)


def two_ahead(config: PreTrainedConfig) -> HybridCache:
    """Stream with two layers of prefetch."""
    return OffloadedHybridCache(config, prefetch_layers=2, cpu_decode=False)


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
SAME_ATTENTION: dict[str, Callable[..., HybridCache]] = {
    "dynamic": dynamic,
    "offloaded": offloaded,
    "two_ahead": two_ahead,
}
# Attention is the kernel's: results differ by rounding.
OWN_ATTENTION: dict[str, Callable[..., HybridCache]] = {
    "default": DynamicHybridCache,
    "shared_with_nobody": shared_with_nobody,
}
# Both ends of the context on the device, the middle in host memory, attended to by the kernel, streamed, or half of it.
SPLIT: dict[str, Callable[..., HybridCache]] = {
    "split": lambda config: OffloadedHybridCache(config, device_tokens=128, cpu_decode=True),
    "split_streamed": lambda config: OffloadedHybridCache(config, device_tokens=128, cpu_decode=False),
    "split_in_three": lambda config: OffloadedHybridCache(config, device_tokens=128, cpu_decode=0.5),
}
CACHES = SAME_ATTENTION | OWN_ATTENTION | SPLIT


def codecs_of_last_layers(config: PreTrainedConfig) -> dict[int, KVCodec]:
    """The first layer of full attention stays in full precision, the last has more bits than those between."""
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


def quantized(
    codec: KVCodec | Callable[[PreTrainedConfig], dict[int, KVCodec]],
    placement: Placement | None = None,
    is_shared: bool = False,
) -> tuple[MakeCache, MakeCache]:
    """Return a quantized cache beside the same codes in a plain one; `codec` may depend on the model."""

    def codecs(config: PreTrainedConfig) -> KVCodec | dict[int, KVCodec]:
        return codec if isinstance(codec, KVCodec) else codec(config)

    return (
        lambda config: HybridCache(
            config, placement, codec=codecs(config), group=group_of_one() if is_shared else None
        ),
        lambda config: quantized_reference(config, codecs(config), placement.device_tokens if placement else 0),
    )


ON_DEVICE, STREAMED = Placement(cpu_decode=False), Placement(offload=True, cpu_decode=False)
# Attention is torch's own: results are the same to the last bit.
QUANTIZED_SAME_ATTENTION = {
    "quantized_on_device": quantized(minmax(4, sink_tokens=0, rotate=True), ON_DEVICE),
    "quantized_balanced_on_device": quantized(lambda config: channel_scaled_codecs(config, 4), ON_DEVICE),
    "quantized_streamed": quantized(minmax((8, 4), rotate=False), STREAMED),
}
# Attention is the kernel's, over the codes.
QUANTIZED_OWN_ATTENTION = {
    "quantized_4": quantized(minmax(4, rotate=True)),
    "quantized_8": quantized(minmax(8, rotate=True)),
    "quantized_2": quantized(minmax(2, group_size=16, sink_tokens=0, rotate=True), Placement(cpu_decode=True)),
    "quantized_balanced": quantized(lambda config: channel_scaled_codecs(config, 8)),
    "quantized_shared_with_nobody": quantized(minmax(8, sink_tokens=0, rotate=True), is_shared=True),
    "quantized_split": quantized(minmax(8, rotate=True), Placement(cpu_decode=True, device_tokens=128)),
    "quantized_split_streamed": quantized(
        minmax(4, sink_tokens=0, rotate=True), Placement(offload=True, cpu_decode=False, device_tokens=128)
    ),
    "quantized_split_in_three": quantized(
        minmax(8, sink_tokens=0, rotate=True), Placement(offload=True, cpu_decode=0.5, device_tokens=128)
    ),
    "quantized_last_layers": quantized(codecs_of_last_layers),
}
QUANTIZED = QUANTIZED_SAME_ATTENTION | QUANTIZED_OWN_ATTENTION
# Their codecs are chosen when the first block is coded.
CHOOSING: dict[str, Callable[..., HybridCache]] = {
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
    "8 bits streamed": lambda config: QuantizedHybridCache(config, bits=8, offload=True, cpu_decode=False),
    "8 bits split": lambda config: QuantizedHybridCache(config, bits=8, offload=True, device_tokens=128),
}
