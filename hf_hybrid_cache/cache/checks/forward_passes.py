"""The borders between forward passes, and whether each pass has reached all layers."""

from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from ...layers import IncompleteCacheError, tensors_of
from ..contents.contents import Contents

# Before transformers had it, models took some states out of the layers themselves, of which the cache hears nothing.
HEARS_OF_LINEAR_STATES = hasattr(Cache, "get_conv_state")


class ForwardPasses:
    """
    Tracks the layers that the last forward pass has reached, and refuses another one if it has ended half-way.

    The order of calls tells where a pass begins. Layers of attention count their tokens, those of linear attention do
    not: of a model that has some it is noted that all of these, and the first and the last one of attention, were
    reached.
    """

    def __init__(self, contents: Contents):
        self._contents = contents
        self._linear = {
            index
            for index, layer in enumerate(contents.layers)
            if HEARS_OF_LINEAR_STATES and isinstance(layer, LinearAttentionCacheLayerMixin)
        }
        # Layers between the first and the last may read the states of others.
        attention = list(contents.of_text)
        self._expected = {*self._linear, *attention[:1], *attention[-1:]} if self._linear else set()
        self._keeps_linear_states = False  # some models keep them themselves
        self.reset()

    def reset(self) -> None:
        """Forget all passes."""
        self._accesses: set[tuple[int, str]] = set()
        self._last = self._last_of_pass_before = -1
        self._was_asked = self._was_asked_half_way = False
        self._tokens_before = 0

    def note_question(self) -> int:
        """Note that somebody asks for the length, as a pass does before its first layer; return it."""
        first, last = self._contents.lengths_of_ends()
        self._was_asked, self._was_asked_half_way = True, first != last or self._is_unfinished
        return first

    def note_mask(self, query_length: int, layer_idx: int) -> None:
        """Note that a mask is made; raise `IncompleteCacheError` if another pass begins and the last is unfinished."""
        self._was_asked = True
        if query_length == 0 or self._begins_with(layer_idx):
            self.require_finished()

    def note_access(self, layer_idx: int, access: str) -> None:
        """
        Note that a pass comes to a layer for something that is done once in a pass, such as "keys and values".

        If it is another pass, the length it was told must be true.
        """
        if layer_idx >= len(self._contents.layers):
            raise ValueError(
                f"The model has a layer {layer_idx} (counted from 0), and the cache was made for "
                f"{len(self._contents.layers)} layers. Make it with the config of this model, model.config."
            )
        if self._begins_with(layer_idx, access):
            if self._was_asked_half_way:
                self.require_finished()
            self._contents.stores.recently_lent.take_edits()
            # Code that fills a cache by layers does not ask.
            self._tokens_before = self._contents.num_tokens if self._was_asked else 0
            self._was_asked = False
            self._last_of_pass_before = self._last
            self._accesses.clear()
        self._was_asked_half_way = False
        self._last = layer_idx
        self._accesses.add((layer_idx, access))
        self._keeps_linear_states |= layer_idx in self._linear

    def require_reached(self, layer_idx: int, num_tokens: int) -> None:
        """Raise `IncompleteCacheError` if earlier passes have not reached this layer, which holds `num_tokens`."""
        if self._tokens_before and not num_tokens and layer_idx in self._contents.of_text:
            self._last_of_pass_before = -1  # it has ended before the model's last layer
            raise IncompleteCacheError(
                f"An error or an interruption ended an earlier forward pass half-way: layer {layer_idx} holds nothing, "
                f"and those before it hold {self._tokens_before:,} tokens. Call cache.reset(), or use a new cache."
            )

    def require_finished(self) -> None:
        """Raise `IncompleteCacheError` if layers that the passes have reached hold different tokens."""
        if self._is_unfinished:
            raise IncompleteCacheError(
                "An error or an interruption ended a forward pass half-way: not all layers of linear attention have "
                "seen its tokens, and they cannot go back to what they held. Call cache.reset(), or use a new cache."
            )
        first, last = self._contents.lengths_of_ends()
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
        kept, longer = sorted(self._contents.lengths_of_ends())
        is_whole = kept == longer and not self._is_unfinished
        if self._may_lack_layers or (kept == 0 and not is_whole):
            return False
        if is_whole:
            return True
        if others := {type(layer).__name__ for layer in self._contents.theirs if list(tensors_of(layer))}:
            lengths = ", ".join(f"{length:,}" for length in self._contents.checkpoints.lengths)
            way_out = f"cache.go_back(n) to a checkpoint ({lengths}), or cache.reset()" if lengths else "cache.reset()"
            raise IncompleteCacheError(
                f"An error or an interruption ended a forward pass half-way, and layers of type "
                f"{', '.join(sorted(others))} cannot go back. Call {way_out}, or use a new cache."
            )
        for layer in self._contents.ours:
            if layer.get_seq_length() == longer:
                layer.crop(kept - longer)
        return True

    def _begins_with(self, layer_idx: int, access: str | None = None) -> bool:
        """Whether a call for this layer begins a new pass."""
        return self._last < 0 or layer_idx < self._last or (layer_idx, access) in self._accesses

    @property
    def _is_unfinished(self) -> bool:
        """Whether the last pass has reached some of the layers that do not count tokens, and not all of them."""
        if not self._keeps_linear_states:
            return False
        reached = self._expected.intersection(layer_idx for layer_idx, _ in self._accesses)
        return 0 < len(reached) < len(self._expected)

    @property
    def _may_lack_layers(self) -> bool:
        """
        Whether the last layers of attention hold nothing, and only one pass has ended before them.

        Something may have ended it half-way. A model that has fewer layers than its config says ends all of them there.
        """
        have_ended_alike = self._last >= 0 and self._last == self._last_of_pass_before
        if have_ended_alike or not self._contents.num_tokens:
            return False
        *_, last = self._contents.of_text.values()
        return last.get_seq_length() == 0
