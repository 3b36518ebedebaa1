"""Finding the borders between forward passes from the order in which layers are called."""

from collections.abc import Sequence

from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

# Before transformers had it, models took some states out of the layers themselves, of which the cache hears nothing.
HEARS_OF_LINEAR_STATES = hasattr(Cache, "get_conv_state")


class ForwardPasses:
    """
    Tracks the layers that the last forward pass has reached.

    Layers of attention count their tokens, those of linear attention do not: of a model that has some it is noted that
    all of these, and the first and the last one of attention, were reached.

    Args:
        layers: of a cache.
    """

    def __init__(self, layers: Sequence[object]):
        linear = [
            index
            for index, layer in enumerate(layers)
            if HEARS_OF_LINEAR_STATES and isinstance(layer, LinearAttentionCacheLayerMixin)
        ]
        # Layers between the first and the last may read the states of others.
        attention = [index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
        self._linear = set(linear)
        self._expected = {*linear, *attention[:1], *attention[-1:]} if linear else set()
        self._keeps_linear_states = False  # some models keep them themselves
        self._reached: set[int] = set()
        self._accesses: set[tuple[int, str]] = set()
        self._last = -1
        self._last_of_pass_before = -1

    def begins_with(self, layer: int, access: str | None = None) -> bool:
        """
        Whether a call for this layer begins a new forward pass.

        Args:
            layer: its index.
            access: what is read or written there, if that is done once in a pass.
        """
        return self._last < 0 or layer < self._last or (layer, access) in self._accesses

    def note_access(self, layer: int, access: str) -> None:
        """Note that a pass reads or writes states of a layer; arguments as of `begins_with`."""
        if self.begins_with(layer, access):
            before = self._last
            self.reset()
            self._last_of_pass_before = before
        self._last = layer
        self._accesses.add((layer, access))
        if layer in self._expected:
            self._reached.add(layer)
        if layer in self._linear:
            self._keeps_linear_states = True

    def reset(self) -> None:
        """Forget all passes."""
        self._reached.clear()
        self._accesses.clear()
        self._last = self._last_of_pass_before = -1

    @property
    def have_ended_alike(self) -> bool:
        """Whether the last two passes have ended at the same layer, which is the model's last one then."""
        return self._last >= 0 and self._last == self._last_of_pass_before

    def note_difference(self) -> None:
        """Note that passes before this one have ended before the model's last layer."""
        self._last_of_pass_before = -1

    @property
    def is_unfinished(self) -> bool:
        """Whether the last pass has reached some of the layers that do not count tokens, and not all of them."""
        return self._keeps_linear_states and bool(self._reached) and self._reached != self._expected
