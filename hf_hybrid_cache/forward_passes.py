"""Notices a forward pass that ended half-way: layers of linear attention keep no count of tokens that would tell."""

from collections.abc import Sequence

from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin


class ForwardPasses:
    """
    Which layers the last forward pass has reached: all of linear attention, and the first and last one of attention.

    Args:
        layers: of a cache; without linear attention among them nothing is noted.
    """

    def __init__(self, layers: Sequence[object]):
        linear = [index for index, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
        # Those between may read what others hold.
        attention = [index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
        self._expected = {*linear, *attention[:1], *attention[-1:]} if linear else set()
        self._reached: set[int] = set()
        self._last = 0

    def reach(self, layer: int) -> None:
        """Note that a pass reads or writes the states of a layer; after a later one, another pass has begun."""
        if layer < self._last:
            self._reached.clear()
        self._last = layer
        if layer in self._expected:
            self._reached.add(layer)

    def reset(self) -> None:
        """Forget all passes."""
        self._reached.clear()
        self._last = 0

    @property
    def is_unfinished(self) -> bool:
        """Whether the last pass has reached some layers and not all."""
        return bool(self._reached) and self._reached != self._expected
