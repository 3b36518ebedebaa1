"""Removing conversations that others take the place of."""

import contextlib

import numpy as np

from ..prefix_folder import NodeFileError, NodeInUseError, NodeNotFoundError, PrefixFolder
from .nodes.keys import num_common, num_shared_tokens


class Replaced:
    """
    A conversation as it was kept before, which is not to be listed beside what it has become.

    Args:
        folder: of its nodes.
        own_id: of its last node.
        keys: of what it has become, `[tokens]`.

    Raises:
        PrefixStoreFolderError: the folder cannot be read.
    """

    def __init__(self, folder: PrefixFolder, own_id: bytes, keys: np.ndarray):
        self._folder, self._own_id = folder, own_id
        try:
            before = folder.token_ids(own_id)
        except (NodeNotFoundError, NodeFileError):
            before = keys[:0]  # nothing is left to remove
        self._common = num_common(before, keys)
        self._shared_tokens = num_shared_tokens(before)
        self._is_continued = self._common == len(before)

    def remove_taken_back(self) -> None:
        """Remove the turns that were taken back, before the conversation is kept without them."""
        if not self._is_continued:
            self._remove(max(self._common, self._shared_tokens))

    def remove_continued(self, new_id: bytes) -> None:
        """Remove its last node if the one with more tokens does not follow it, but begins at the same block border."""
        if self._is_continued and new_id != self._own_id:
            self._remove(self._shared_tokens)

    def _remove(self, except_tokens: int) -> None:
        with contextlib.suppress(NodeInUseError):
            self._folder.remove_unshared(self._own_id, except_tokens)
