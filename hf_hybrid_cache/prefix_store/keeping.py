"""Writing the states of a prompt into a folder, at once or while it is read."""

import warnings

import numpy as np

from ..cache import Contents
from ..prefix_folder import NodeNotFoundError, PayloadWriter, PrefixFolder, PrefixFolderError
from ..saving.writing import bytes_of
from ..storage import GRANULE
from .lookup import Found
from .node_description import NodeDescription
from .prompt import Prompt
from .states import NodeStates, states_since


class Keeper:
    """
    Keeps the states of a prompt after each forward pass, as long as there is room.

    Args:
        folder: where.
        prompt: whose states.
        found: that its cache was filled with.
    """

    def __init__(self, folder: PrefixFolder, prompt: Prompt, found: Found):
        self._folder, self._prompt = folder, prompt
        self._end, self._before = found.num_tokens, found.last_states
        self._is_keeping = True

    def after_pass(self, reached: int, is_last: bool) -> None:
        """Keep what came with the last pass, which ended after `reached` tokens."""
        prompt = self._prompt
        self._is_keeping = self._is_keeping and prompt.passes.is_kept(self._end, reached)
        if not self._is_keeping:
            return
        needs_whole = prompt.passes.needs_whole_nodes
        keys, description = prompt.keys[:reached], NodeDescription.of(prompt.model, prompt.identity, prompt.title)
        try:
            self._before = add_states(
                self._folder, keys, self._end, self._before, prompt.contents, description, needs_whole
            )
        except (NodeNotFoundError, PrefixFolderError) as error:
            self._is_keeping = False
            warnings.warn(f"The prompt is read, and not kept beyond {self._end:,} tokens: {error}", stacklevel=5)
        self._end = reached


def add_states(
    folder: PrefixFolder,
    keys: np.ndarray,
    stored: int,
    before: NodeStates | None,
    contents: Contents,
    description: NodeDescription,
    needs_whole_nodes: bool,
) -> NodeStates:
    """
    Add a node with what a cache holds beyond the first tokens.

    Args:
        folder: where.
        keys: of all tokens that the cache holds, `[tokens]`.
        stored: how many of them are stored.
        before: the node with the last of these.
        contents: of the cache.
        description: of the node, without its states.
        needs_whole_nodes: whether states go on only from the end of a node.

    Returns:
        the description of the states.

    Raises:
        NodeNotFoundError: what was stored is gone.
        PrefixFolderError: it cannot be written, or does not fit.
    """
    start = stored - stored % GRANULE
    states, tensors = states_since(start, before, contents.layers, contents.stores)

    def write(file: PayloadWriter) -> None:
        for section, tensor in zip(states.sections, tensors, strict=True):
            file.write(bytes_of(tensor))
            file.write(bytes(section.padded_bytes - section.form.num_bytes))

    data = description.with_states(states).to_bytes()
    digest = description.identity.digest
    folder.add(digest, keys, start, states.num_bytes, write, data, whole_nodes=needs_whole_nodes)
    return states
