"""The caches of the sweep, and the devices on which each can decode."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache

GPU, CPU_ATTENTION, CPU = DECODE_DEVICES = ("gpu", "cpu-attention", "cpu")
# `cpu_decode` for each; None attends where the model computes, also once it has moved.
_CPU_DECODE = {GPU: False, CPU_ATTENTION: True, CPU: None}


@dataclass(frozen=True)
class SweptCache:
    """
    A cache that is measured.

    Attributes:
        make: from a model's config and `cpu_decode`.
        with_gpu: decode devices on a machine with a GPU.
        without_gpu: whether it runs on a machine that has none.
        package: that must be installed.
        codes_all_anew: with every update, so that it must get a synthetic prefill in one.
        weights: bits of a weight where the CPU decodes; `None` for the weights as they are.
    """

    make: Callable[[PreTrainedConfig, bool | None], Cache]
    with_gpu: tuple[str, ...]
    without_gpu: bool = True
    package: str | None = None
    codes_all_anew: bool = False
    weights: int | None = None

    @property
    def is_installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None

    def decode_devices(self) -> tuple[str, ...]:
        """The devices of this machine on which it can decode."""
        if torch.cuda.is_available():
            return self.with_gpu
        return (CPU,) if self.without_gpu else ()


def _dynamic(with_gpu: tuple[str, ...] = DECODE_DEVICES, weights: int | None = None) -> SweptCache:
    return SweptCache(
        lambda config, cpu_decode: DynamicHybridCache(config, cpu_decode=cpu_decode), with_gpu, weights=weights
    )


def _quantized(bits: int, with_gpu: tuple[str, ...] = DECODE_DEVICES, weights: int | None = None) -> SweptCache:
    return SweptCache(
        lambda config, cpu_decode: QuantizedHybridCache(config, bits, cpu_decode=cpu_decode), with_gpu, weights=weights
    )


CACHES = {
    "stock": SweptCache(lambda config, _: DynamicCache(config=config), (GPU,)),
    "stock-offloaded": SweptCache(lambda config, _: DynamicCache(config=config, offloading=True), (GPU,), False),
    "quanto-4": SweptCache(
        lambda config, _: QuantizedCache("quanto", config, nbits=4), (GPU,), package="optimum", codes_all_anew=True
    ),
    "dynamic": _dynamic(),
    "offloaded": SweptCache(
        lambda config, cpu_decode: OffloadedHybridCache(config, cpu_decode=cpu_decode), DECODE_DEVICES
    ),
    "quantized-8": _quantized(8),
    "quantized-4": _quantized(4),
    "quantized-2": _quantized(2),
    "quantized-4-offloaded": SweptCache(
        lambda config, cpu_decode: QuantizedHybridCache(config, 4, offload=True, cpu_decode=cpu_decode), (GPU,), False
    ),
    # Weights of few bits are for models that decode on the CPU.
    "dynamic-weights-8": _dynamic((CPU,), weights=8),
    "dynamic-weights-4": _dynamic((CPU,), weights=4),
    "quantized-4-weights-4": _quantized(4, (CPU,), weights=4),
}


def make_cache(name: str, config: PreTrainedConfig, decode_device: str) -> Cache:
    return CACHES[name].make(config, _CPU_DECODE[decode_device])
