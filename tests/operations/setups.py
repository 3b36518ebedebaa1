"""Random caches of random models: every place, form and size of keys and values that there is."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from unittest import mock

import hypothesis.strategies as st
import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import HybridCache, KVCodec, Placement, minmax, quanto
from hf_hybrid_cache.codecs import MinMaxCodec
from hf_hybrid_cache.storage import InitialCapacity
from hf_hybrid_cache.storage.memory import buffer_memory

from common.channel_scaled import channel_scaled
from common.lazy_streams import copy_late
from common.quantized_reference import quantized_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    """

    dtype: torch.dtype
    num_layers: int
    num_kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    placement: Placement
    host_tokens: int
    reserves: bool
    codecs: dict[int, KVCodec]
    copies_late: bool
    integer_kernels: bool | None

    @property
    def config(self) -> PreTrainedConfig:
        return LlamaConfig(num_hidden_layers=self.num_layers, hidden_size=16, num_attention_heads=4, vocab_size=8)

    def cache(self) -> HybridCache:
        cache = HybridCache(self.config, self.placement, codec=self.codecs)
        cache._stores.capacity = InitialCapacity(host_tokens=self.host_tokens)
        if self.copies_late:
            copy_late(cache)
        return cache

    def reference(self) -> DynamicCache:
        return quantized_reference(self.config, self.codecs)

    def system(self) -> AbstractContextManager:
        """Return the context in which the cache is used."""
        return nullcontext() if self.reserves else mock.patch.object(buffer_memory, "reserve", return_value=None)


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


def _has_kernel(codec: KVCodec) -> bool:
    return isinstance(codec.keys, MinMaxCodec) and codec.keys.per_channel


@st.composite
def setups(draw: st.DrawFn, dtype: torch.dtype, is_quantized: bool, copies_late: bool) -> Setup:
    num_layers = draw(st.integers(1, 4))
    layers = st.integers(0, num_layers - 1)
    codecs = draw(st.dictionaries(layers, _CODECS, min_size=1)) if is_quantized else {}
    without_kernel = {layer for layer, codec in codecs.items() if not _has_kernel(codec)}
    on_cpu = st.frozensets(layers).map(lambda drawn: drawn - without_kernel)
    cpu_decode = draw(st.one_of(st.sampled_from([None, False, *([] if without_kernel else [True])]), on_cpu))
    num_kv_heads, key_dim = draw(st.integers(1, 3)), draw(_DIMS)
    value_dim = draw(st.just(key_dim) | _DIMS)
    for layer, codec in codecs.items():
        if isinstance(codec.keys, MinMaxCodec) and draw(st.booleans()):
            dims = (key_dim, value_dim)
            codecs[layer] = channel_scaled(codec, num_kv_heads, *dims, seed=layer)
    return Setup(
        dtype=dtype,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        group=draw(st.integers(1, 4)),
        key_dim=key_dim,
        value_dim=value_dim,
        placement=Placement(
            offload=copies_late or draw(st.booleans()),
            prefetch_layers=draw(st.integers(0, 4)),
            resident_layers=draw(st.integers(0, num_layers)),
            cpu_decode=cpu_decode,
        ),
        host_tokens=draw(st.sampled_from([131_072, 1, 70, 500])),
        reserves=draw(st.booleans()),
        codecs=codecs,
        copies_late=copies_late,
        integer_kernels=draw(st.sampled_from([None, False])) if is_quantized else None,
    )
