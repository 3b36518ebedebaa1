"""The caches that are compared on a machine with a GPU, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from transformers import LlamaConfig
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from experiments.gpu.machine import has_gpu
from experiments.quality.quality_caches import installed_version
from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, Placement, QuantizedHybridCache

LEAST_DEVICE_TOKENS = 128
Bits = int | tuple[int, int]


@dataclass(frozen=True)
class Measured:
    """
    A cache, the place of the model, and the requirements of both.

    Attributes:
        make: an empty cache for a model; `empty` calls it.
        package: that must be installed.
        streams: keys and values cross the bus in every step.
        on_host: the model is on the CPU, too.
        attends_on_host: the CPU attends, with as many threads as it is told.
        share_on_device: of the tokens, with the others in host memory; 0 where that is not a question.
        adapts: its share of the CPU is moved, so that some steps come before any that count.
        weight_bits: of a model on the CPU; `None` for weights as they are.
        codes_all_anew: with every update, so that it must be filled at once.
        needs_gpu: it does not run on a CPU.
    """

    make: Callable[..., Cache]
    package: str | None = None
    streams: bool = False
    on_host: bool = False
    attends_on_host: bool = False
    share_on_device: float = 0.0
    adapts: bool = False
    weight_bits: int | None = None
    codes_all_anew: bool = False
    needs_gpu: bool = False

    def empty(self, config: LlamaConfig, context: int) -> Cache:
        """Make an empty cache for a model of `config` and so many tokens."""
        on_device = max(LEAST_DEVICE_TOKENS, int(context * self.share_on_device))
        return self.make(config, **({"device_tokens": on_device} if self.share_on_device else {}))

    def why_not(self) -> str | None:
        """Return the reason why it cannot be measured here; `None` if it can."""
        if self.package is not None and installed_version(self.package) is None:
            return f"{self.package} is not installed"
        return "needs a GPU" if self.needs_gpu and not has_gpu() else None


def _resident(bits: Bits) -> Measured:
    return Measured(partial(QuantizedHybridCache, bits=bits, cpu_decode=False))


def _streamed(bits: Bits) -> Measured:
    return Measured(partial(QuantizedHybridCache, bits=bits, offload=True, cpu_decode=False), streams=True)


def _offloaded(resident_share: float = 0.0, pin_memory: bool | None = None, prefetch_layers: int = 1) -> Measured:
    def make(config: LlamaConfig) -> Cache:
        resident_layers = round(resident_share * config.num_hidden_layers)
        return HybridCache(config, Placement(True, prefetch_layers, resident_layers, pin_memory, cpu_decode=False))

    return Measured(make, streams=True)


def _cpu_attention(make: Callable[..., Cache]) -> Measured:
    return Measured(partial(make, cpu_decode=True), attends_on_host=True)


def _on_host(make: Callable[[LlamaConfig], Cache], weight_bits: int | None = None) -> Measured:
    return Measured(make, on_host=True, attends_on_host=True, weight_bits=weight_bits)


def _peer(backend: str, package: str) -> Measured:
    # HQQ has groups along one axis, which transformers wants to be told.
    axes = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}

    def make(config: LlamaConfig) -> Cache:
        return QuantizedCache(backend, config, nbits=4, **axes)

    return Measured(make, package=package, codes_all_anew=True)


def _half(make: Callable[..., Cache]) -> Measured:
    """Keep half of the tokens on the device, and let the CPU attend to the others at the same time."""
    return Measured(partial(make, cpu_decode=True), attends_on_host=True, share_on_device=0.5)


def _in_three(make: Callable[..., Cache]) -> Measured:
    """Keep half of the tokens on the device, stream some of the others, and let the CPU attend to the rest."""
    return Measured(partial(make, cpu_decode="auto"), attends_on_host=True, share_on_device=0.5, adapts=True)


_OF_4_BITS = partial(QuantizedHybridCache, bits=4)

CACHES: Mapping[str, Measured] = {
    "stock": Measured(lambda config: DynamicCache(config=config)),
    "dynamic": Measured(partial(DynamicHybridCache, cpu_decode=False)),
    "codes-8": _resident(8),
    "codes-4": _resident(4),
    "codes-4-2": _resident((4, 2)),
    "codes-2": _resident(2),
    "quanto-4": _peer("quanto", "optimum-quanto"),
    "hqq-4": _peer("hqq", "hqq"),
    "stock-offloaded": Measured(
        lambda config: DynamicCache(config=config, offloading=True), streams=True, needs_gpu=True
    ),
    "offloaded": Measured(partial(OffloadedHybridCache, cpu_decode=False), streams=True),
    "offloaded-pageable": _offloaded(pin_memory=False),
    "offloaded-2-ahead": _offloaded(prefetch_layers=2),
    "offloaded-resident-25%": _offloaded(resident_share=0.25),
    "offloaded-resident-50%": _offloaded(resident_share=0.5),
    "offloaded-resident-75%": _offloaded(resident_share=0.75),
    "offloaded-resident-100%": _offloaded(resident_share=1.0),
    "streamed-8": _streamed(8),
    "streamed-4": _streamed(4),
    "streamed-2": _streamed(2),
    "cpu-attention": _cpu_attention(DynamicHybridCache),
    "cpu-attention-4": _cpu_attention(_OF_4_BITS),
    "half-cpu-attention": _half(OffloadedHybridCache),
    "half-cpu-attention-4": _half(_OF_4_BITS),
    "half-in-three": _in_three(OffloadedHybridCache),
    "half-in-three-4": _in_three(partial(_OF_4_BITS, offload=True)),
    "half-streamed": Measured(partial(OffloadedHybridCache, cpu_decode=False), streams=True, share_on_device=0.5),
    "host": _on_host(DynamicHybridCache),
    "host-4": _on_host(_OF_4_BITS),
    "host-weights-4": _on_host(DynamicHybridCache, 4),
    "host-4-weights-4": _on_host(_OF_4_BITS, 4),
}
