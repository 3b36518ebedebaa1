"""Attention over a layer's codes on the device of the model: from a store to the kernel, and what it gives merged."""

import torch

from ..codecs import MinMaxCodec, is_foldable, map_to_states
from ..device_kernels import LONGEST_HEAD, Codes, Parts, attend_in_parts, runs_on
from ..storage import CodedStore, KVCodec, KVShape, KVStore
from .layer_selection import LayerSelection

_LOWEST = torch.finfo(torch.float32).min


def has_code_kernel(codec: KVCodec, shape: KVShape) -> bool:
    """Whether a kernel attends to states of `shape` that are coded like this, on their device; of "meta", on any."""
    return (
        is_foldable(codec)
        and max(shape.key_dim, shape.value_dim) <= LONGEST_HEAD
        and shape.key_dtype == shape.value_dtype
        and (shape.device.type == "meta" or runs_on(shape.device))
    )


class CodeAttention:
    """
    Attends to one layer's coded blocks where they are, instead of putting all of its states together for each use.

    Attributes:
        is_declined: something other than this reads the states, so that they are better put together at once.
    """

    def __init__(self) -> None:
        self.is_declined = False
        # Of the codec that the layer had last.
        self._codec: KVCodec | None = None
        self._query_map: torch.Tensor | None = None
        self._result_map: torch.Tensor | None = None

    def __call__(
        self,
        query: torch.Tensor,
        store: KVStore,
        group: int,
        mask: torch.Tensor | None,
        scale: float | None,
        selection: LayerSelection | None = None,
    ) -> torch.Tensor:
        """
        Attend to the tokens of `store`, all of them.

        Arguments and result are those of `CpuAttention`; the query and what is stored are on one device.
        """
        assert isinstance(store, CodedStore)
        if store.wants_queries:
            store.observe(query)
        (keys, values), records = store.parts()
        codec, shape = store.codec, store.shape
        assert isinstance(codec.keys, MinMaxCodec)
        assert isinstance(codec.values, MinMaxCodec)
        self._follow(codec, store)
        batch, query_heads, length, key_dim = query.shape
        rows = query.reshape(batch, query_heads // group, group * length, key_dim)
        turned = rows.float() if self._query_map is None else rows.float() @ self._query_map
        codes = Codes(
            *records,
            min(store.num_tokens, store.sink_tokens),
            codec.keys.layout(key_dim),
            codec.values.layout(shape.value_dim),
        )
        scale = key_dim**-0.5 if scale is None else scale
        parts = attend_in_parts(rows, turned, keys, values, codes, length, mask, scale)
        return self._merged(parts).to(query.dtype).reshape(batch, query_heads, length, -1)

    def decline(self) -> None:
        """Note that something needs the states themselves."""
        self.is_declined = True

    def _follow(self, codec: KVCodec, store: CodedStore) -> None:
        """Have the maps of `codec` on the device; it changes once, when it is chosen."""
        device = store.shape.device
        if self._codec is codec and (self._query_map is None or self._query_map.device == device):
            return
        assert isinstance(codec.keys, MinMaxCodec)
        assert isinstance(codec.values, MinMaxCodec)
        of_keys = map_to_states(codec.keys, store.shape.key_dim)
        of_values = map_to_states(codec.values, store.shape.value_dim)
        # A product with a key that is mapped is one of the query, mapped the other way round.
        self._query_map = None if of_keys is None else of_keys.mT.contiguous().to(device)
        self._result_map = None if of_values is None else of_values.to(device)
        self._codec = codec

    def _merged(self, parts: Parts) -> torch.Tensor:
        """float32 `[batch, num_kv_heads, rows, value_dim]`; zeros where no token is seen."""
        # Where no part has a token that is seen the weights are any, of zeros.
        weights = parts.log_sums.clamp_min(_LOWEST).softmax(dim=-1)
        coded = (weights[..., None, :-1] @ parts.outs[..., :-1, :]).squeeze(-2)
        full = weights[..., -1:] * parts.outs[..., -1, :]
        return full + (coded if self._result_map is None else coded @ self._result_map)
