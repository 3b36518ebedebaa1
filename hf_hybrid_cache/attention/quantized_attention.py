"""Attention over a layer's codes on the device of the model: from a store to the kernel, and merging of its results."""

import torch

from ..codecs import as_written, folded_codecs, is_foldable, map_to_states
from ..device_kernels import LONGEST_HEAD, Codes, attend_in_splits, merged, runs_on
from ..storage import AnyStore, KVCodec, KVShape, Store
from .layer_selection import LayerSelection


def has_quantized_kernel(codec: KVCodec, shape: KVShape) -> bool:
    """Return whether a kernel on their device (any, for "meta") attends to states of `shape` quantized like this."""
    return (
        is_foldable(codec)
        and max(shape.key_dim, shape.value_dim) <= LONGEST_HEAD
        and shape.key_dtype == shape.value_dtype
        and (shape.device.type == "meta" or runs_on(shape.device))
    )


class QuantizedAttention:
    """
    Attends to one layer's quantized blocks where they are, instead of putting all of its states together for each use.

    Attributes:
        is_declined: something else reads the states, so that they are better put together at once.
    """

    def __init__(self) -> None:
        self.is_declined = False
        # The last codec of the layer, and its maps.
        self._codec: KVCodec | None = None
        self._device: torch.device | None = None
        self._query_map: torch.Tensor | None = None
        self._result_map: torch.Tensor | None = None

    def takes_prompts(self, store: AnyStore) -> bool:
        """Return false, because the states of a prompt are there in full precision."""
        return False

    def __call__(
        self,
        query: torch.Tensor,
        store: AnyStore,
        group: int,
        mask: torch.Tensor | None,
        scale: float | None,
        selection: LayerSelection | None = None,
        are_causal: bool = False,
    ) -> torch.Tensor:
        """
        Attend to the tokens of `store`, all of them.

        Arguments and result are those of `StoredAttention`; the query and what is stored are on one device.
        """
        assert not store.is_continued
        assert store.ends is None
        assert not are_causal
        if store.wants_queries:
            store.observe(query)
        store.settle()
        assert store.packed is not None
        assert store.codec is not None
        (keys, values), packed = store.dense.read(), store.packed.read()
        codec, shape = store.codec, store.shape
        of_keys, of_values = folded_codecs(codec)
        self._follow(codec, store)
        batch, query_heads, length, key_dim = query.shape
        rows = query.reshape(batch, query_heads // group, group * length, key_dim)
        codes = Codes(
            *packed,
            min(store.num_tokens, store.sink_tokens),
            of_keys.layout(key_dim),
            of_values.layout(shape.value_dim),
        )
        scale = key_dim**-0.5 if scale is None else scale
        parts = attend_in_splits(rows, self._turned(rows), keys, values, codes, length, mask, scale)
        return merged(parts, self._result_map, query.dtype).reshape(batch, query_heads, length, -1)

    def decline(self, what: str, num_tokens: int) -> None:
        """Note that something needs the states themselves."""
        self.is_declined = True

    def reset(self) -> None:
        """Forget that something needed the states."""
        self.is_declined = False

    def _turned(self, rows: torch.Tensor) -> torch.Tensor:
        """Return queries as products with codes need them, float32."""
        if self._query_map is None:
            return rows.float()
        with as_written(rows.device):
            return rows.float() @ self._query_map

    def _follow(self, codec: KVCodec, store: Store) -> None:
        """Copy the maps of `codec` to the device; it changes once, when it is chosen."""
        device = store.shape.device
        if self._codec is codec and self._device == device:
            return
        keys, values = folded_codecs(codec)
        of_keys = map_to_states(keys, store.shape.key_dim)
        of_values = map_to_states(values, store.shape.value_dim)
        # A product with a mapped key is one of the key with the query mapped by the transpose.
        self._query_map = None if of_keys is None else of_keys.mT.contiguous().to(device)
        self._result_map = None if of_values is None else of_values.to(device)
        self._codec, self._device = codec, device
