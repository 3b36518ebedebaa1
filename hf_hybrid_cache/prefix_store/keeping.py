"""Writing the states of a prompt into a folder, at once or while it is read."""

import warnings

from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..layers import tensors_of
from ..prefix_folder import NodeNotFoundError, PayloadWriter, PrefixFolder, PrefixStoreFolderError
from ..saving.writing import bytes_of
from ..storage import GRANULE
from .errors import PrefixStoreError
from .lookup import Found
from .nodes.states import states_since
from .prompts.prompt import Prompt


class Keeper:
    """
    Keeps the states of a prompt, after each forward pass as long as there is room, or of a conversation.

    Args:
        folder: where.
        prompt: whose states.
        found: what of it is stored, in use meanwhile.
    """

    def __init__(self, folder: PrefixFolder, prompt: Prompt, found: Found):
        self._folder, self._prompt = folder, prompt
        self._end, self._before = found.num_tokens, found.last_states
        self._is_keeping = True

    def after_pass(self, reached: int, is_last: bool) -> None:
        """
        Keep what came with the last pass, which ended after `reached` tokens.

        Raises:
            PrefixStoreError: the model has put states elsewhere than into the cache.
        """
        _require_all_states(self._prompt, reached)
        # Where attention shows no queries, a codec would be chosen by as many tokens as are read next.
        self._prompt.contents.settle()
        are_read = self._prompt.contents.stores.attention.has_given_states
        self._is_keeping = self._is_keeping and self._prompt.passes.is_kept(self._end, reached, are_read)
        if not self._is_keeping:
            return
        try:
            self.keep(reached)
        except (NodeNotFoundError, PrefixStoreFolderError) as error:
            self._is_keeping = False
            warnings.warn(f"The prompt is read, and not kept beyond {self._end:,} tokens: {error}", stacklevel=5)

    def keep(self, reached: int) -> bytes:
        """
        Add a node with what the cache holds of the first `reached` tokens beyond those that are stored.

        Returns:
            the id of the node.

        Raises:
            NodeNotFoundError: what was stored is gone.
            PrefixStoreFolderError: it cannot be written, or does not fit.
        """
        prompt = self._prompt
        start = min(self._end, reached - 1) // GRANULE * GRANULE  # all may be stored
        states, tensors = states_since(start, self._before, prompt.contents.layers, prompt.contents.stores)

        def write(file: PayloadWriter) -> None:
            for section, tensor in zip(states.sections, tensors, strict=True):
                file.write(bytes_of(tensor))
                file.write(bytes(section.padded_bytes - section.form.num_bytes))

        description = prompt.description.with_states(states).to_bytes()
        digest, keys, needs_whole = prompt.identity.digest, prompt.keys[:reached], prompt.passes.needs_whole_nodes
        own_id = self._folder.add(digest, keys, start, states.num_bytes, write, description, needs_whole)
        self._end, self._before = reached, states
        return own_id


def _require_all_states(prompt: Prompt, reached: int) -> None:
    held = prompt.contents.num_tokens
    are_elsewhere = any(
        isinstance(layer, LinearAttentionCacheLayerMixin) and next(tensors_of(layer), None) is None
        for layer in prompt.contents.layers
    )
    if held != reached or are_elsewhere:
        raise PrefixStoreError(
            f"{type(prompt.model).__name__} has read {reached:,} tokens, and the cache holds "
            f"{'not all states of' if held == reached else 'those of'} {held:,}: the others are elsewhere, or nowhere, "
            "and cannot be kept. Pass the prompt to generate without a store."
        )
