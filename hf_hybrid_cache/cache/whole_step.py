"""Decode steps that write the states of all layers in one call, instead of layer by layer through `update`."""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..attention import blocks_of, place_of
from ..kernels import StoredBlocks
from ..layers import HybridLayer
from ..storage import SharedPrefix, Store
from .hybrid_cache import HybridCache

# Of tokens that may follow where no layer is ours.
_ANY_NUMBER = sys.maxsize
# Rotary embeddings whose angles depend on the furthest position of a pass.
_CHANGING = ("dynamic", "longrope")


def is_unaltered(cache_or_layer: object) -> bool:
    """Return whether a cache, or a layer of one, takes states as this package does: nobody else has its `update`."""
    kind = type(cache_or_layer)
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0] and "update" not in vars(cache_or_layer)


def border_of_angles(config: Any) -> int:
    """Return the number of tokens beyond which a pass of several gives other angles than a step of one."""
    text = config.get_text_config(decoder=True)
    given = getattr(text, "rope_parameters", None) or {}
    kinds = [given, *(each for each in given.values() if isinstance(each, dict))]
    borders = [
        each.get("original_max_position_embeddings") or text.max_position_embeddings
        for each in kinds
        if str(each.get("rope_type")) in _CHANGING
    ]
    return min([getattr(text, "max_position_embeddings", None) or 2**31, *borders])


class WholeSteps:
    """
    Steps whose keys and values a kernel writes to our layers. They keep nothing of the cache alive.

    Args:
        cache: its tokens.
        layers: indices of the layers that a kernel attends to.
        has_updates: whether the step calls the cache for anything else.

    Attributes:
        indices: of these layers, in order.
        blocks: the records of the layers' tokens, to which a step adds the next one.
        prefixes: those of tokens before these that several sequences share, by the place of the layer in `indices`.
        num_left: how many tokens may follow now, in one step or several; 0 if a layer has something to do first.
        why_none: the reason why not, or an empty string.

    Raises:
        IncompleteCacheError: something has ended a change of the cache half-way.
    """

    def __init__(self, cache: HybridCache, layers: Sequence[int], has_updates: bool = False):
        self._cache = weakref.ref(cache)
        self.indices = tuple(sorted(layers))
        self._has_updates = has_updates or not layers
        found = (layer for index, layer in enumerate(cache.layers) if index in layers)
        ours = [layer for layer in found if isinstance(layer, HybridLayer) and is_unaltered(layer)]
        stores = [store for layer in ours if (store := layer.store_in_place()) is not None]
        self.num_left, self.why_none = 0, ""
        if len(ours) < len(self.indices):
            self.why_none = "the cache has layers of another kind"
        elif not cache._contents.num_tokens:
            self.why_none = "the cache holds no tokens"
        elif len(stores) < len(ours):
            self.why_none = "the CPU does not attend to all tokens of every layer in one place"
        elif len({store.num_tokens for store in stores}) > 1:
            self.why_none = "layers of the cache hold different tokens"
        else:
            self.num_left = min((_growing(store).make_place() for store in stores), default=_ANY_NUMBER)
            self.why_none = "" if self.num_left else "a layer of the cache chooses its codec"
        stores = stores if self.num_left else []
        growing = [_growing(store) for store in stores]
        self.blocks, self.prefixes = [blocks_of(store) for store in growing], dict[int, StoredBlocks]()
        for index, store in enumerate(stores):
            if isinstance(store, SharedPrefix) and isinstance(store.prefix, Store):
                self.prefixes[index] = blocks_of(store.prefix)
        self._layers, self._held = [weakref.ref(layer) for layer in ours], [weakref.ref(store) for store in stores]
        self._stores = [weakref.ref(store) for store in growing]
        self._places, self._versions = [each.place for each in self.blocks], [store.version for store in growing]

    @property
    def stores(self) -> list[Store]:
        """The stores of the layers to which tokens come."""
        found = [store() for store in self._stores]
        return [store for store in found if store is not None]

    def are_of(self, cache: HybridCache) -> bool:
        """Return whether a step may follow in this cache, of which nothing but these steps has changed a layer."""
        if self._cache() is not cache or not self.num_left:
            return False
        for layer_of, held_by, store_of, place, version in zip(
            self._layers, self._held, self._stores, self._places, self._versions, strict=True
        ):
            layer, held, store = layer_of(), held_by(), store_of()
            if layer is None or held is None or store is None or not layer.still_has(held):
                return False
            if store.version != version or place_of(store) != place:
                return False
        return True

    def num_alike(self, other: "WholeSteps") -> int:
        """
        Return how many first tokens of the records have the same keys and values in another cache.

        They are none where a cache has several sequences, or its records begin after a prefix.
        """
        one, another = self._cache(), other._cache()
        batches = {store.shape.batch for store in (*self.stores, *other.stores)}
        if one is None or another is None or batches != {1} or self.prefixes or other.prefixes:
            return 0
        return one._contents.num_alike(another._contents)

    def begin(self) -> None:
        """
        Note that a step begins, as the cache does when a forward pass comes to its first layer.

        Raises:
            IncompleteCacheError: the pass before has not reached all layers.
        """
        cache: Any = self._cache()
        cache._passes.are_asked_about = True  # by the mask, in a model's own forward
        if not self._has_updates:
            cache._passes.note_access(self.indices[0], "keys and values")
        cache._stores.note_pass(cache._stores.first_layer)

    def count_next(self, length: int) -> None:
        """Count the tokens of the next step in the records; the stores count them once they are written."""
        for store, blocks in zip(self.stores, self.blocks, strict=True):
            blocks.count(store.own_tokens + length, store.hidden_from_next())

    def end(self, length: int, queries: Callable[[], Iterable[tuple[int, torch.Tensor]]]) -> None:
        """
        Count the tokens that are written to all layers.

        Args:
            length: tokens of each sequence.
            queries: gives the layers with the queries that have attended to them, `[batch, heads, length, head_dim]`.
        """
        cache: Any = self._cache()
        stores = self.stores
        try:
            for store in stores:
                store.note_written(length)
        except BaseException:
            for store in stores:
                store.forget_uncounted(length)
            raise
        if self.indices:
            cache._passes.note_reached(self.indices[-1])
        if cache._prompts.are_asked_about:
            cache._prompts.note_stored()
        if any(store.lacks_queries for store in stores):
            of_layers = dict(zip(self.indices, stores, strict=True))
            for index, each in queries():
                of_layers[index].observe(each)
        self.num_left -= length if stores else 0
        self._versions = [store.version for store in stores]


def _growing(store: Store | SharedPrefix) -> Store:
    """The store of the tokens that each sequence has for itself, to which others come; a prefix stays as it is."""
    growing = store.tails if isinstance(store, SharedPrefix) else store
    assert isinstance(growing, Store)
    return growing
