"""The borders between forward passes, and whether each pass has reached all layers."""

from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from ..layers import IncompleteCacheError, tensors_of
from .checkpoints import kinds_in_the_way
from .contents import Contents

# Before transformers had it, models took some states out of the layers themselves, of which the cache hears nothing.
HEARS_OF_LINEAR_STATES = hasattr(Cache, "get_conv_state")


class ForwardPasses:
    """
    Tracks how far the last forward pass has come, and refuses another one if that ended half-way.

    A pass comes to layers in their order, so one that comes to a layer of before, or to the same one for the same
    thing, is another one. Layers of attention count their tokens, so they tell which of them a pass has reached; those
    of linear attention do not.

    Attributes:
        are_asked_about: whether somebody has asked for the length of the cache since a pass came to a layer; a pass
            does so before its first layer.
        tokens_before: those of the cache when the pass began, if it asked for them; code that fills a cache layer by
            layer does not ask.
    """

    def __init__(self, contents: Contents):
        self._contents = contents
        self._linear = {
            index
            for index, layer in enumerate(contents.layers)
            if HEARS_OF_LINEAR_STATES and isinstance(layer, LinearAttentionCacheLayerMixin)
        }
        self._last_layer = max([*self._linear, *contents.of_text], default=-1)
        self._keeps_linear_states = False  # some models keep them themselves
        self.reset()

    def reset(self) -> None:
        """Forget all passes."""
        self._reached, self._first_access = -1, (-1, "")  # the layer at hand, and what the pass came to it for first
        self._pass_before_reached = -1
        self.are_asked_about = False
        self.tokens_before = 0

    def note_access(self, layer_idx: int, access: str) -> None:
        """
        Note that a pass comes to a layer for something that is done once in a pass, such as "keys and values".

        If it is another pass than before, and was told a length, that must be true.
        """
        if layer_idx >= len(self._contents.layers):
            raise ValueError(
                f"The model has a layer {layer_idx} (counted from 0), and the cache was made for "
                f"{len(self._contents.layers)} layers. Make it with the config of this model, model.config."
            )
        if self._reached < 0 or layer_idx < self._reached or (layer_idx, access) == self._first_access:  # another one
            if self.are_asked_about:
                self.require_finished()
            self.tokens_before = self._contents.num_tokens if self.are_asked_about else 0
            self._pass_before_reached, self._reached = self._reached, -1
        self.are_asked_about = False
        if layer_idx > self._reached:
            self._reached, self._first_access = layer_idx, (layer_idx, access)
        self._keeps_linear_states |= layer_idx in self._linear

    def note_reached(self, layer_idx: int) -> None:
        """Note that the pass has come as far as a layer, or further."""
        self.are_asked_about = False
        self._reached = max(self._reached, layer_idx)

    def require_reached(self, layer_idx: int) -> None:
        """Raise `IncompleteCacheError` if the passes before have not reached this layer, which holds nothing."""
        if self.tokens_before and layer_idx in self._contents.of_text:
            self._pass_before_reached = -1  # it has ended before the model's last layer
            raise IncompleteCacheError(
                f"An error or an interruption ended an earlier forward pass half-way: layer {layer_idx} holds nothing, "
                f"and those before it hold {self.tokens_before:,} tokens. Call cache.reset(), or use a new cache."
            )

    def require_finished(self) -> None:
        """Raise `IncompleteCacheError` if layers that the passes have reached hold different tokens."""
        if self._is_unfinished:
            raise IncompleteCacheError(
                "An error or an interruption ended a forward pass half-way: not all layers of linear attention have "
                "seen its tokens, and they cannot go back to what they held. Call cache.reset(), or use a new cache."
            )
        first, last = self._lengths_of_ends()
        if first != last:
            lengths = [layer.get_seq_length() for layer in self._contents.of_text.values()]
            index = next(index for index, length in enumerate(lengths) if length != first)
            raise IncompleteCacheError(
                f"An error or an interruption ended a forward pass, or crop, half-way: the first {index} layers of "
                f"attention hold {first:,} tokens, the last one {last:,}. Call cache.drop_unfinished() to go "
                "back to what all of them hold, or cache.reset()."
            )

    def require_complete(self) -> None:
        """Raise `IncompleteCacheError` as `require_finished`, or if the last layers hold nothing."""
        self.require_finished()
        if self._may_lack_layers:
            raise IncompleteCacheError(
                "The last layers hold nothing: something ended a forward pass half-way, or the model has fewer layers "
                f"than the {len(self._contents.layers)} of its config. Call cache.reset(), or make the cache with a "
                "config that has the number of layers in num_hidden_layers."
            )

    def note_put_back(self) -> None:
        """Note that all layers are what they were at a checkpoint, whatever the last pass has reached."""
        if self._is_unfinished:
            self.reset()

    def take_back(self) -> bool:
        """
        Remove tokens that not all layers hold; return `False` if all of them would have to go, and nothing has changed.

        Layers of transformers' own cannot go back: if they took part, raise `IncompleteCacheError`.
        """
        kept, longer = sorted(self._lengths_of_ends())
        if kept == longer and not self._is_unfinished and not self._may_lack_layers:
            return True
        if self._may_lack_layers or kept == 0:
            return False
        others = {type(layer).__name__ for layer in self._contents.theirs if list(tensors_of(layer))}
        longer_ones = [layer for layer in self._contents.ours if layer.get_seq_length() == longer]
        if others := others.union(kinds_in_the_way(longer_ones, kept, longer)):
            lengths = ", ".join(f"{length:,}" for length in sorted(self._contents.checkpoints))
            way_out = f"cache.go_back(n) to a checkpoint ({lengths}), or cache.reset()" if lengths else "cache.reset()"
            raise IncompleteCacheError(
                f"An error or an interruption ended a forward pass half-way, and layers of type "
                f"{', '.join(sorted(others))} cannot go back. Call {way_out}, or use a new cache."
            )
        for layer in longer_ones:
            layer.crop(kept - longer)
        return True

    def _lengths_of_ends(self) -> tuple[int, int]:
        """
        Return the tokens in the first and the last layer of attention, which differ if something did not reach all.

        The last one is the last that holds any: models may have fewer layers than their config says.
        """
        from_last = (layer.get_seq_length() for layer in reversed(self._contents.of_text.values()))
        return self._contents.num_tokens, next(filter(None, from_last), 0)

    @property
    def _is_unfinished(self) -> bool:
        """Whether the last pass has reached some of the layers that do not count tokens, and not all of them."""
        return self._keeps_linear_states and 0 <= self._reached < self._last_layer

    @property
    def _may_lack_layers(self) -> bool:
        """
        Whether the last layers of attention hold nothing, and only one pass has ended before them.

        Something may have ended it half-way. A model that has fewer layers than its config says ends all of them there.
        """
        have_ended_alike = self._reached >= 0 and self._reached == self._pass_before_reached
        if have_ended_alike or not self._contents.num_tokens:
            return False
        *_, last = self._contents.of_text.values()
        return last.get_seq_length() == 0
