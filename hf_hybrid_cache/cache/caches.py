"""The caches for common cases, and the logits processor for processes that share one. `generate` takes them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from transformers import LogitsProcessor, PreTrainedConfig

from ..codecs import minmax
from ..layers import Placement
from ..processes import Peers
from .hybrid_cache import HybridCache

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Bits = int | tuple[int, int]
CpuDecode = bool | float | Literal["auto"] | None


class DynamicHybridCache(HybridCache):
    """
    A cache on the compute device that grows in place: a new token costs the write of one token.

    Args:
        config: the model's config (`model.config`).
        max_length: tokens that will be stored, if known: memory of an accelerator is then taken once.
        cpu_decode: keep layers in host memory and attend to them there, with a kernel, when few tokens come at once:
            `True`, `False` or `None` (if the model is on the CPU).
        group: processes that keep a shard each, see `HybridCache`.
        offloading: `False`, see `HybridCache`.

    Example:
        >>> cache = DynamicHybridCache(model.config)
        >>> model.generate(**inputs, cache=cache, max_new_tokens=200)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_length: int | None = None,
        cpu_decode: bool | None = None,
        group: "ProcessGroup | None" = None,
        offloading: bool = False,
    ):
        super().__init__(config, Placement(cpu_decode=cpu_decode), max_length, None, group, offloading)


class OffloadedHybridCache(HybridCache):
    """
    A cache in host memory whose layers are streamed to the compute device ahead of use.

    Only new tokens go back to the host. The device holds `prefetch_layers + 1` layers.

    Args:
        config: the model's config (`model.config`).
        prefetch_layers: how many layers are on their way to the device while one is attended to.
        cpu_decode: attend to layers in host memory, with a kernel, when few tokens come at once: `True`, `False`,
            `None` (if the model is on the CPU), a fraction of each layer's tokens in host memory, while the others are
            streamed, or `"auto"`, which finds the fraction while decoding.
        device_tokens: tokens of each layer that are on the device, at most: the first and the most recent ones. The
            device attends to them, with `cpu_decode` while the CPU attends to the others. 0 for none.
        offloading: `False`, see `HybridCache`.

    Example:
        >>> cache = OffloadedHybridCache(model.config)
        >>> model.generate(**inputs, cache=cache, max_new_tokens=200)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        prefetch_layers: int = 1,
        cpu_decode: CpuDecode = None,
        device_tokens: int = 0,
        offloading: bool = False,
    ):
        placement = Placement(True, prefetch_layers, True, cpu_decode, device_tokens)
        super().__init__(config, placement, offloading=offloading)


class QuantizedHybridCache(HybridCache):
    """
    A cache in 8, 4 or 2 bits: keys per channel, values per token (KIVI, arXiv:2402.02750), channel-scaled and rotated.

    Blocks of 64 tokens are quantized once, when 64 more have come after them. The first 64 tokens and the last 64 to
    127 stay in full precision. `HybridCache(config, codec=minmax(...))` lets you choose all of this.

    Args:
        config: the model's config (`model.config`).
        bits: 8, 4 or 2 for each number; a pair for keys and for values; or a mapping from indices of layers to one of
            these, where the layers that are not named stay in full precision.
        offload: keep quantized blocks in host memory and stream them to the compute device, where `False` keeps them.
        max_length: tokens that will be stored, if known: memory of an accelerator is then taken once.
        cpu_decode: attend to quantized blocks in host memory, with a kernel, when few tokens come at once: `True`,
            `False`, `None` (if the model is on the CPU), a fraction of each layer's tokens, or `"auto"`, see
            `OffloadedHybridCache`.
        device_tokens: with `offload` or `cpu_decode`, tokens of each layer that are on the device in full precision, at
            most: the first and the most recent ones. 0 for none.
        group: processes that keep a shard each, see `HybridCache`.
        offloading: leave it out; a model that passes it makes a cross-attention cache of this class by itself.

    Raises:
        TypeError: `offloading` is given.
        ValueError: another argument is none of these.

    Example:
        >>> cache = QuantizedHybridCache(model.config, bits=4)
        >>> model.generate(**inputs, cache=cache, max_new_tokens=200)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        bits: Bits | Mapping[int, Bits] = 4,
        offload: bool = False,
        max_length: int | None = None,
        cpu_decode: CpuDecode = None,
        device_tokens: int = 0,
        group: "ProcessGroup | None" = None,
        offloading: bool | None = None,
    ):
        if offloading is not None:
            raise TypeError(
                "This model makes a cross-attention cache of the class it is given, and would lose bits and other "
                "options. Pass EncoderDecoderCache(cache, DynamicHybridCache(config)): it holds the prompt once."
            )
        codec = {key: minmax(each) for key, each in bits.items()} if isinstance(bits, Mapping) else minmax(bits)
        placement = Placement(offload, cpu_decode=cpu_decode, device_tokens=device_tokens)
        super().__init__(config, placement, max_length, codec, group)


class SameLogits(LogitsProcessor):
    """
    A logits processor that gives all processes of a group the logits of the first one.

    Machines of different kinds, or different numbers of threads, differ in the last bits, and some day these decide
    which token is the likeliest. To sample, call `transformers.set_seed` in all of them besides.

    Args:
        group: of processes that share a cache.

    Raises:
        LostProcessError: another process ended, or did not call it.

    Example:
        >>> cache = DynamicHybridCache(model.config, group=group)
        >>> model.generate(**inputs, cache=cache, logits_processor=[SameLogits(group)])
    """

    def __init__(self, group: "ProcessGroup"):
        self._peers = Peers(group)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self._peers.of_the_first(scores)  # type: ignore[return-value]
