"""The caches for common cases. Each is passed to a model, or to `generate`, as `cache`."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

from transformers import PreTrainedConfig

from ..codecs import Rotate, minmax
from ..layers import OnOom, Placement, Selection
from ..storage import KVCodec
from .hybrid_cache import HybridCache, require_config

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


CpuDecode = bool | float | Collection[int] | None
_SHARE_AT_FIRST = 0.5


class DynamicHybridCache(HybridCache):
    """
    A cache on the compute device that grows in place: a new token costs the write of one token.

    Args:
        config: the model's config (`model.config`).
        max_length: tokens that will be stored, if known: memory of an accelerator is then taken once.
        cpu_decode: keep layers in host memory and attend to them there, with a kernel, when few tokens come at once:
            `True`, `False`, `None` (if the model is on the CPU) or the indices of some layers.
        group: processes that keep a share each, see `HybridCache`.
        selection: what attention on the CPU may leave out, see `Selection`; `None` for nothing.
        offloading: `False`, see `HybridCache`.

    Example:
        >>> cache = DynamicHybridCache(model.config)
        >>> model.generate(**inputs, cache=cache, max_new_tokens=200)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_length: int | None = None,
        cpu_decode: bool | Collection[int] | None = None,
        group: "ProcessGroup | None" = None,
        selection: Selection | None = None,
        offloading: bool = False,
    ):
        super().__init__(config, Placement(cpu_decode=cpu_decode), max_length, None, group, selection, offloading)


class OffloadedHybridCache(HybridCache):
    """
    A cache in host memory whose layers are streamed to the compute device ahead of use.

    Only new tokens go back to the host. The device holds `prefetch_layers + 1` layers, and the resident ones.

    Args:
        config: the model's config (`model.config`).
        prefetch_layers: how many layers are on their way to the device while one is attended to.
        resident_layers: how many layers keep a copy on the device that is never given up.
        pin_memory: page-lock the host memory; `None` does so for CUDA.
        cpu_decode: attend to layers in host memory, with a kernel, when few tokens come at once: `True`, `False`,
            `None` (if the model is on the CPU), the indices of some layers, a share of each layer's tokens in host
            memory, where the others are streamed meanwhile, or `"auto"`: a share that is found while decoding.
        on_oom: what to do when the device has no room for a layer in use: `"evict"` gives up the copies of all others,
            resident ones for good, and tries once more, with the same tokens; `"raise"` does not.
        device_tokens: tokens of each layer that are on the device, at most: the first and the most recent ones. The
            device attends to them, with `cpu_decode` while the CPU attends to the others. 0 for none.
        selection: what attention on the CPU may leave out, see `Selection`; `None` for nothing.
        offloading: `False`, see `HybridCache`.

    Example:
        >>> cache = OffloadedHybridCache(model.config)
        >>> model.generate(**inputs, cache=cache, max_new_tokens=200)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        prefetch_layers: int = 1,
        resident_layers: int = 0,
        pin_memory: bool | None = None,
        cpu_decode: CpuDecode | Literal["auto"] = None,
        on_oom: OnOom = "evict",
        device_tokens: int = 0,
        selection: Selection | None = None,
        offloading: bool = False,
    ):
        share, adapts = _share_of(cpu_decode)
        placement = Placement(True, prefetch_layers, resident_layers, pin_memory, share, on_oom, device_tokens, adapts)
        super().__init__(config, placement, selection=selection, offloading=offloading)


Bits = int | tuple[int, int]


class QuantizedHybridCache(HybridCache):
    """
    A cache of min-max codes: keys per channel, values per token (KIVI, arXiv:2402.02750), balanced and rotated.

    Blocks of 64 tokens are coded once, when 64 more have come after them. The first tokens and the last 64 to 127 stay
    in full precision.

    Args:
        config: the model's config (`model.config`).
        bits: 8, 4 or 2 for each number; a pair for keys and for values; a list with one of these, or `None` for full
            precision, for each layer of the model; or a mapping from indices of layers, where the layers that are not
            named stay in full precision.
        offload: keep codes in host memory and stream them to the compute device; `False` keeps them there.
        group_size: numbers that share a scale, a multiple of 16: along the tokens of a block for keys (64 at most),
            along head_dim for values.
        sink_tokens: first tokens that stay in full precision, filled up to whole blocks of 64.
        rotate: rotate each key and value by a Hadamard transform before it is coded, which spreads outliers over all
            channels; `"auto"` balances the channels of each head before that, by what the first keys, values and
            queries are like (`codecs` tells how).
        auto_bits: give the keys, or the values, of a layer more bits, up to 8, where their codes lose far more than is
            usual with so many; all layers together take at most half as much memory more. `codecs`, and the cache when
            it is printed, tell where.
        max_length: tokens that will be stored, if known: memory of an accelerator is then taken once.
        cpu_decode: attend to the codes in host memory, with a kernel, when few tokens come at once: `True`, `False`,
            `None` (if the model is on the CPU), the indices of some layers, a share of each layer's tokens, or
            `"auto"`, see `OffloadedHybridCache`.
        prefetch_layers: with `offload`, layers that are on their way while one is attended to.
        resident_layers: with `offload`, layers that keep a copy of their codes on the device that is never given up.
        device_tokens: with `offload` or `cpu_decode`, tokens of each layer that are on the device in full precision, at
            most: the first and the most recent ones. 0 for none.
        group: processes that keep a share each, see `HybridCache`.
        selection: what attention on the CPU may leave out, see `Selection`; `None` for nothing.
        offloading: to be left out: a model that says it makes a cross-attention cache with other bits by itself.

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
        bits: Bits | list[Bits | None] | Mapping[int, Bits] = 4,
        offload: bool = False,
        group_size: int = 64,
        sink_tokens: int = 64,
        rotate: Rotate = "auto",
        auto_bits: bool = False,
        max_length: int | None = None,
        cpu_decode: CpuDecode | Literal["auto"] = None,
        prefetch_layers: int = 1,
        resident_layers: int = 0,
        device_tokens: int = 0,
        group: "ProcessGroup | None" = None,
        selection: Selection | None = None,
        offloading: bool | None = None,
    ):
        if offloading is not None:
            raise TypeError(
                "This model makes a cross-attention cache of the class it is given, and would lose bits and other "
                "options. Pass EncoderDecoderCache(cache, DynamicHybridCache(config)): it holds the prompt once."
            )
        codec: KVCodec | dict[int, KVCodec]
        if isinstance(bits, list):
            bits = _bits_of_layers(config, bits)
        if isinstance(bits, Mapping):
            codec = {index: minmax(each, group_size, sink_tokens, rotate, auto_bits) for index, each in bits.items()}
        else:
            codec = minmax(bits, group_size, sink_tokens, rotate, auto_bits)
        share, adapts = _share_of(cpu_decode)
        placement = Placement(offload, prefetch_layers, resident_layers, None, share, "evict", device_tokens, adapts)
        super().__init__(config, placement, max_length, codec, group, selection)


def _share_of(cpu_decode: CpuDecode | Literal["auto"]) -> tuple[CpuDecode, bool]:
    """`cpu_decode` of a placement, and whether it adapts."""
    return (_SHARE_AT_FIRST, True) if cpu_decode == "auto" else (cpu_decode, False)


def _bits_of_layers(config: PreTrainedConfig, bits: list[Bits | None]) -> dict[int, Bits]:
    require_config(config)
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    if len(bits) != num_layers:
        raise ValueError(f"bits has {len(bits)} entries and the model {num_layers} layers; give one for each.")
    return {index: each for index, each in enumerate(bits) if each is not None}
