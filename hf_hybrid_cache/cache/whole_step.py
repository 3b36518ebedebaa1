"""Decode steps that write the states of all layers in one call, instead of layer by layer through `update`."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..attention import blocks_of, place_of
from ..layers import HybridLayer
from ..storage import Store, mean_squares
from .hybrid_cache import HybridCache


def is_unaltered(cache_or_layer: object) -> bool:
    """Return whether a cache, or a layer of one, takes states as this package does: nobody else has its `update`."""
    kind = type(cache_or_layer)
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0] and "update" not in vars(cache_or_layer)


class WholeSteps:
    """
    Steps of one token, of which a kernel writes keys and values to all layers. They keep nothing of the cache alive.

    Args:
        cache: its tokens.
        indices: of the layers of the model.

    Attributes:
        blocks: the records of the layers' tokens, to which a step adds the next one.
        num_left: how many steps may follow now; 0 if a layer has something else to do first.
        why_none: the reason why not, or an empty string.

    Raises:
        IncompleteCacheError: something has ended a change of the cache half-way.
    """

    def __init__(self, cache: HybridCache, indices: Sequence[int]):
        self._cache, self._indices = weakref.ref(cache), indices
        layers = [cache.layers[index] for index in indices if index < len(cache.layers)]
        ours = [layer for layer in layers if isinstance(layer, HybridLayer) and is_unaltered(layer)]
        stores = [store for layer in ours if (store := layer.store_in_place()) is not None]
        self.num_left, self.why_none = 0, ""
        if len(ours) < len(indices):
            self.why_none = "the cache has layers of another kind"
        elif not any(layer.get_seq_length() for layer in ours):
            self.why_none = "the cache holds no tokens"
        elif len(stores) < len(indices):
            self.why_none = "the CPU does not attend to all tokens of every layer in one place"
        elif len({store.num_tokens for store in stores}) > 1:
            self.why_none = "layers of the cache hold different tokens"
        else:
            self.num_left = min(store.make_place() for store in stores)
            self.why_none = "" if self.num_left else "a layer of the cache packs a block"
        self.blocks = [blocks_of(store) for store in stores] if self.num_left else []
        self._layers, self._stores = [weakref.ref(layer) for layer in ours], [weakref.ref(store) for store in stores]
        self._places, self._versions = [each.place for each in self.blocks], [store.version for store in stores]

    @property
    def stores(self) -> list[Store]:
        """The stores of the layers."""
        found = [store() for store in self._stores]
        return [store for store in found if store is not None]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that every layer holds."""
        store = self._stores[0]()
        assert store is not None
        return store.num_tokens

    def are_of(self, cache: HybridCache) -> bool:
        """Return whether a step may follow in this cache, of which nothing but these steps has changed a layer."""
        if self._cache() is not cache or not self.num_left:
            return False
        for layer_of, store_of, place, version in zip(
            self._layers, self._stores, self._places, self._versions, strict=True
        ):
            layer, store = layer_of(), store_of()
            if layer is None or store is None or store.version != version or not layer.still_has(store):
                return False
            if place_of(store) != place:
                return False
        return True

    def begin(self) -> None:
        """
        Note that a step begins, as the cache does when a forward pass comes to its first layer.

        Raises:
            IncompleteCacheError: the pass before has not reached all layers.
        """
        cache: Any = self._cache()
        cache._passes.are_asked_about = True  # by the mask, in a model's own forward
        cache._passes.note_access(self._indices[0], "keys and values")
        cache._stores.note_pass(0)
        self.count_next()

    def count_next(self) -> None:
        """Count the token to come in the records; the stores count it once it is written."""
        num_tokens = self.num_tokens + 1
        for blocks in self.blocks:
            blocks.count(num_tokens)

    def end(self, queries: torch.Tensor) -> None:
        """Count the token that is written to all layers; `[layers, batch, heads, 1, head_dim]` have attended to it."""
        cache: Any = self._cache()
        stores = self.stores
        try:
            for store in stores:
                store.note_written()
        except BaseException:
            for store in stores:
                store.forget_uncounted()
            raise
        cache._passes.note_access(self._indices[-1], "keys and values")
        if cache._prompts.are_asked_about:
            cache._prompts.note_stored()
        if any(store.wants_queries for store in stores):
            squares = mean_squares(queries, stores[0].shape.num_kv_heads)
            for store, each in zip(stores, squares, strict=True):
                store.observe_squares(each)
        self.num_left -= 1
        self._versions = [store.version for store in stores]
