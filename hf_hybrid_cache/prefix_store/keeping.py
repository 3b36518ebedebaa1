"""Keeping the states of a prompt in a folder, at once or while it is read."""

import contextlib
import warnings

from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..layers import tensors_of
from ..storage import GRANULE
from .errors import NodeInUseError, NodeNotFoundError, PrefixStoreError, PrefixStoreFolderError
from .finding import find_all
from .folder import Folder
from .keys import as_bytes, num_common, num_read_tokens
from .prompt import Prompt
from .states import NodeStates, states_since


class Keeper:
    """Keeps the states of a prompt after those of `end` tokens, pass by pass as long as there is room, or at once."""

    def __init__(self, folder: Folder, prompt: Prompt, end: int, before: NodeStates | None):
        self._folder, self._prompt = folder, prompt
        self._end, self._before = end, before
        self._is_keeping = True

    def after_pass(self, reached: int, is_last: bool) -> None:
        """Keep what came with the last pass, which ended after `reached` tokens."""
        contents, passes = self._prompt.contents, self._prompt.passes
        _require_all_states(self._prompt, reached)
        # Where attention shows no queries, a codec would be chosen by as many tokens as are read next.
        contents.settle()
        contents.note_keys(self._prompt.identity.digest, self._prompt.keys[:reached])
        self._is_keeping = self._is_keeping and passes.is_kept(self._end, reached)
        if not self._is_keeping:
            return
        try:
            self.keep(reached)
        except (NodeNotFoundError, PrefixStoreFolderError) as error:
            self._is_keeping = False
            warnings.warn(f"The prompt is read, and not kept beyond {self._end:,} tokens: {error}", stacklevel=5)

    def keep(self, reached: int) -> str:
        """Add a node with what is not stored of the first `reached` tokens, and return its name; see `Folder.add`."""
        prompt = self._prompt
        border = min(self._end, reached - 1) // GRANULE * GRANULE  # all may be stored
        try:
            states, sections = states_since(border, self._before, prompt.contents.layers, prompt.contents.stores)
        except ValueError as error:
            raise PrefixStoreError(f"What the cache holds cannot be kept: {error}") from error
        name = self._folder.add(
            prompt.identity.digest,
            prompt.keys[:reached],
            self._end,
            sections,
            prompt.description,
            states.to_json(),
        )
        self._end, self._before = reached, states
        return name


def keep_conversation(folder: Folder, conversation: Prompt, replaces: str | None) -> str:
    """Keep a conversation, in place of a node where it ended before; return the name of the one where it ends now."""
    keys, contents, identity = conversation.keys, conversation.contents, conversation.identity.digest
    _require_all_states(conversation, len(keys))
    if replaces is not None:
        with contextlib.suppress(NodeNotFoundError, NodeInUseError):  # nothing is left to remove, or it stays
            before = folder.keys(replaces)
            common = num_common(as_bytes(before), as_bytes(keys))
            if common < len(before):  # turns were taken back
                folder.remove_unshared(replaces, max(common, num_read_tokens(before)))
    if num_read_tokens(known := contents.keys(identity)) == len(keys):  # all questions were taken back
        with folder.find(identity, known) as match:
            if match.num_tokens == len(keys):
                return match.parts[-1].node.name
    match, states = find_all(folder, conversation)
    with match:
        name = Keeper(folder, conversation, match.num_tokens, states).keep(len(keys))
    contents.note_keys(identity, keys)
    return name


def _require_all_states(prompt: Prompt, reached: int) -> None:
    """Raise `PrefixStoreError` if the cache does not hold all states of so many tokens."""
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
