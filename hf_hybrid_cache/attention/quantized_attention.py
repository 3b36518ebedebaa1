"""Attention over a layer's codes on the device of the model: from a store to the kernel, and merging of its results."""

from typing import NamedTuple

import torch

from ..codecs import as_written, folded_codecs, is_foldable, map_to_states
from ..device_kernels import LONGEST_HEAD, Codes, attend_in_splits, merged, runs_on
from ..storage import AnyStore, KVCodec, KVShape, Store
from .queries import Queries


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
        self._maps: _Maps | None = None

    def __call__(self, queries: Queries, store: AnyStore) -> torch.Tensor:
        """
        Attend to all tokens of `store`, which are on the device of the queries.

        Arguments and result are those of `StoredAttention`; queries are not causal.
        """
        assert isinstance(store, Store)
        assert not queries.are_causal
        query, shape, rows = queries.states, store.shape, queries.rows()
        assert store.packed is not None
        assert store.codec is not None
        (keys, values), packed = store.dense.read(), store.packed.read()
        of_keys, of_values = folded_codecs(store.codec)
        layouts = of_keys.layout(shape.key_dim), of_values.layout(shape.value_dim)
        codes = Codes(*packed, min(store.num_tokens, store.layout.own_sink_tokens), *layouts)
        maps = self._maps = _maps_of(store.codec, shape, self._maps)
        turned = rows.float()
        if maps.of_queries is not None:
            with as_written(rows.device):
                turned = turned @ maps.of_queries
        scale = shape.key_dim**-0.5 if queries.scale is None else queries.scale
        parts = attend_in_splits(rows, turned, keys, values, codes, query.shape[2], queries.mask, scale)
        return merged(parts, maps.of_results, query.dtype).reshape(*query.shape[:3], -1)

    def decline(self, what: str, num_tokens: int) -> None:
        """Note that something needs the states themselves."""
        self.is_declined = True

    def reset(self) -> None:
        """Forget that something needed the states."""
        self.is_declined = False


class _Maps(NamedTuple):
    """Matrices on a device that turn queries before products with codes, and results after them; `None` for no turn."""

    codec: KVCodec
    device: torch.device
    of_queries: torch.Tensor | None
    of_results: torch.Tensor | None


def _maps_of(codec: KVCodec, shape: KVShape, last: _Maps | None) -> _Maps:
    """Return the maps of a codec: the last ones, unless it was chosen since."""
    if last is not None and last.codec is codec and last.device == shape.device:
        return last
    keys, values = folded_codecs(codec)
    of_keys, of_values = map_to_states(keys, shape.key_dim), map_to_states(values, shape.value_dim)
    # A product with a mapped key is one of the key with the query mapped by the transpose.
    of_queries = None if of_keys is None else of_keys.mT.contiguous().to(shape.device)
    return _Maps(codec, shape.device, of_queries, None if of_values is None else of_values.to(shape.device))
