"""The layers of a cache, which the other modules of this folder check, report, move and save."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.cache_utils import CacheLayerMixin

from ...layers import HybridLayer, LayerStores, forget_states_of, num_sequences_of
from .checkpoints import Checkpoints


class Contents:
    """
    All layers of a cache.

    Attributes:
        layers: in the order of the model; the types of those of transformers' own differ between its versions.
        stores: where ours get their stores.
        ours: layers of full attention.
        theirs: layers of transformers' own.
        of_text: layers of attention by index, without those that store images.
        checkpoints: of the layers, at lengths that the cache can go back to.
    """

    def __init__(self, layers: list[Any], stores: LayerStores):
        self.layers, self.stores = layers, stores
        self.checkpoints = Checkpoints(layers)
        self.ours = [layer for layer in layers if isinstance(layer, HybridLayer)]
        self.theirs = [layer for layer in layers if not isinstance(layer, HybridLayer)]
        of_images = getattr(stores.config, "cross_attention_layers", None) or ()
        self.of_text = {
            index: layer
            for index, layer in enumerate(layers)
            if isinstance(layer, CacheLayerMixin) and index not in of_images
        }

    @property
    def num_tokens(self) -> int:
        """Tokens in the first layer of attention, also while others hold more or less; 0 without one."""
        return next((layer.get_seq_length() for layer in self.of_text.values()), 0)

    @property
    def num_sequences(self) -> int | None:
        """Number of sequences that are stored; `None` if none are."""
        held = *(layer.batch for layer in self.ours), *map(num_sequences_of, self.theirs)
        return next((each for each in held if each is not None), None)

    def lengths_of_ends(self) -> tuple[int, int]:
        """
        Return the tokens in the first and the last layer of attention, which differ if something did not reach all.

        The last one is the last that holds any: models may have fewer layers than their config says.
        """
        from_last = (layer.get_seq_length() for layer in reversed(self.of_text.values()))
        return self.num_tokens, next(filter(None, from_last), 0)

    def settle(self) -> None:
        """Choose the codecs of states that wait for them, by what is known now."""
        for layer in self.ours:
            if layer.store is not None:
                layer.store.settle()

    def require_whole(self) -> None:
        """Raise `IncompleteCacheError` if something has ended a change half-way."""
        for layer in self.ours:
            layer.require_whole()

    def forget(self) -> None:
        """Drop what is known of the tokens of layers that were reset, and the note of an operation half-way."""
        for layer in self.layers:
            forget_states_of(layer)
        self.stores.take_seen_queries({})
        self.stores.unfinished = None
        self.stores.attention.reset()
        if self.stores.cpu_fraction is not None:
            self.stores.cpu_fraction.reset()

    @contextmanager
    def changing(self, operation: str) -> Iterator[None]:
        """Mark the cache as not whole if an operation on all layers is interrupted after it has changed some."""
        before = self._versions()
        try:
            yield
        except BaseException:
            # Layers of transformers' own do not tell whether they have changed.
            if self.theirs or self._versions() != before:
                self.stores.unfinished = operation
            raise

    def _versions(self) -> list[int | None]:
        return [None if layer.store is None else layer.store.version for layer in self.ours]
