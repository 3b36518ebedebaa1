"""Caches of models: every place, form and size of keys and values that there is, drawn at random or by name."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from unittest import mock

import hypothesis.strategies as st
import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import HybridCache, KVCodec, Placement, minmax, quanto
from hf_hybrid_cache.codecs import MinMaxCodec
from hf_hybrid_cache.storage import CpuFraction, InitialCapacity
from hf_hybrid_cache.storage.memory import buffer_memory

from common.caches import MakeCache, group_of_one
from common.channel_scaled import channel_scaled
from common.lazy_streams import copy_late
from common.quantized_reference import quantized_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 4


class RestlessFraction(CpuFraction):
    """Another share at each use."""

    def blocks(self, num_blocks: int) -> int:
        self.fraction = (self.fraction + 0.3) % 1
        return super().blocks(num_blocks)


@dataclass(frozen=True)
class Setup:
    """
    A cache, and the shape of the states that go into it.

    Attributes:
        group: query heads that share a KV head.
        host_tokens: address space is reserved for so many at first.
        reserves: `False` for a system that reserves no address space.
        codecs: by layer.
        copies_late: streamed, with copies that run as late as they may.
        integer_kernels: as for `set_integer_kernels`.
        is_shard: whether it is the shard of a group, which has no other.
        makers: of the cache and its reference, in place of all options above.
    """

    dtype: torch.dtype = torch.float32
    num_layers: int = NUM_LAYERS
    num_kv_heads: int = NUM_KV_HEADS
    group: int = 2
    key_dim: int = HEAD_DIM
    value_dim: int = HEAD_DIM
    placement: Placement = field(default_factory=Placement)
    host_tokens: int = 131_072
    reserves: bool = True
    codecs: dict[int, KVCodec] = field(default_factory=dict)
    copies_late: bool = False
    integer_kernels: bool | None = None
    is_shard: bool = False
    makers: tuple[MakeCache, MakeCache] | None = None

    @property
    def config(self) -> PreTrainedConfig:
        return LlamaConfig(num_hidden_layers=self.num_layers, hidden_size=16, num_attention_heads=4, vocab_size=8)

    def cache(self) -> HybridCache:
        if self.makers is not None:
            return self.makers[0](self.config)
        group = group_of_one() if self.is_shard else None
        cache = HybridCache(self.config, self.placement, codec=self.codecs, group=group)
        cache._stores.capacity = InitialCapacity(host_tokens=self.host_tokens)
        if self.placement.cpu_fraction is not None:
            cache._stores.cpu_fraction = RestlessFraction(0.5, False, cache.stats)
        if self.copies_late:
            copy_late(cache)
        return cache

    def reference(self) -> DynamicCache:
        if self.makers is not None:
            return self.makers[1](self.config)
        return quantized_reference(self.config, self.codecs, self.placement.device_tokens)

    def system(self) -> AbstractContextManager:
        """Return the context in which the cache is used."""
        return nullcontext() if self.reserves else mock.patch.object(buffer_memory, "reserve", return_value=None)


CONFIG = Setup().config


def _swapped(codec: KVCodec) -> KVCodec:
    """Swap the grouping: keys per token and values per channel, for which there is no kernel."""
    return KVCodec(codec.values, codec.keys, codec.sink_tokens)


_BITS = st.sampled_from([8, 4, 2])
_SINK_TOKENS = st.sampled_from([0, 1, 64, 128])
_MINMAX = st.builds(
    minmax,
    bits=st.tuples(_BITS, _BITS),
    group_size=st.sampled_from([16, 32, 48, 64]),
    sink_tokens=_SINK_TOKENS,
    rotate=st.booleans(),
)
_QUANTO = st.builds(quanto, bits=st.sampled_from([4, 2]), sink_tokens=_SINK_TOKENS)
_CODECS = st.one_of(_MINMAX, _MINMAX, _MINMAX, _MINMAX.map(_swapped), *([_QUANTO] if find_spec("optimum") else []))
_DIMS = st.integers(4, 40) | st.sampled_from([16, 32, 48, 64])
_DEVICE_TOKENS = st.sampled_from([128, 130, 150, 192, 321])


def _has_kernel(codec: KVCodec) -> bool:
    return isinstance(codec.keys, MinMaxCodec) and codec.keys.per_channel


@st.composite
def setups(draw: st.DrawFn, dtype: torch.dtype, is_quantized: bool, copies_late: bool = False) -> Setup:
    num_layers = draw(st.integers(1, 4))
    layers = st.integers(0, num_layers - 1)
    codecs = draw(st.dictionaries(layers, _CODECS, min_size=1)) if is_quantized else {}
    without_kernel = {layer for layer, codec in codecs.items() if not _has_kernel(codec)}
    num_kv_heads, key_dim = draw(st.integers(1, 3)), draw(_DIMS)
    value_dim = draw(st.just(key_dim) | _DIMS)
    kinds = ["whole", "whole", *([] if without_kernel else ["split", "split", *([] if copies_late else ["shard"])])]
    kind = draw(st.sampled_from(kinds))
    if kind == "shard":
        placement = Placement()
    elif kind == "split":
        placement = draw(_splits(num_layers, bool(codecs), copies_late))
        # The reference does not know sinks beyond the first block, of which some would be in host memory.
        codecs = {layer: replace(codec, sink_tokens=min(64, codec.sink_tokens)) for layer, codec in codecs.items()}
    else:
        placement = Placement(
            offload=copies_late or draw(st.booleans()),
            prefetch_layers=draw(st.integers(0, 4)),
            pin_memory=draw(st.booleans()),
            cpu_decode=draw(st.sampled_from([None, False, *([] if without_kernel else [True])])),
        )
    for layer, codec in codecs.items():
        if isinstance(codec.keys, MinMaxCodec) and draw(st.booleans()):
            codecs[layer] = channel_scaled(codec, num_kv_heads, key_dim, value_dim, seed=layer)
    return Setup(
        dtype=dtype,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        group=draw(st.integers(1, 4)),
        key_dim=key_dim,
        value_dim=value_dim,
        placement=placement,
        host_tokens=draw(st.sampled_from([131_072, 1, 70, 500])),
        reserves=draw(st.booleans()),
        codecs=codecs,
        copies_late=copies_late,
        integer_kernels=draw(st.sampled_from([None, False])) if is_quantized else None,
        is_shard=kind == "shard",
    )


@st.composite
def _splits(draw: st.DrawFn, num_layers: int, is_quantized: bool, copies_late: bool) -> Placement:
    """Both ends of the context on the device, of quantized layers in all of them, as the reference has it."""
    cpu_decode = draw(st.sampled_from([True, False, 0.5]))
    return Placement(
        offload=copies_late or cpu_decode is False or draw(st.booleans()),
        prefetch_layers=draw(st.integers(0, 4)),
        cpu_decode=cpu_decode,
        device_tokens=draw(_DEVICE_TOKENS),
    )
