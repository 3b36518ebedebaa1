"""The prompts and conversations that a store has, as lists show them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model_identity import Identity
from ..prefix_folder import Entry, NodeFileError, NodeInUseError, NodeNotFoundError, PrefixFolder
from .errors import PrefixStoreError
from .nodes.description import NodeDescription
from .nodes.keys import token_ids_of


@dataclass(frozen=True)
class StoredPrompt:
    """
    A prompt, or a conversation, that no other one continues.

    Attributes:
        id: of it in the folder, as text.
        identity: of the model and the form of the cache.
        model_name: of the model.
        title: that it was given.
        token_ids: all of them, `[tokens]`.
        document_tokens: those before the first answer; all of them if it is a prompt.
        num_bytes: of its files, with those that other prompts share.
        last_use: seconds since the epoch.
        details: that it was given.
    """

    id: str
    identity: Identity
    model_name: str
    title: str
    token_ids: NDArray[np.int64] = field(compare=False)  # which the id stands for
    document_tokens: int
    num_bytes: int
    last_use: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The title; the id where there is none."""
        return self.title or self.id

    @property
    def is_conversation(self) -> bool:
        """True if it has answers."""
        return self.document_tokens < len(self.token_ids)


class StoredPrompts:
    """
    The prompts and conversations in a folder, to be listed and removed.

    Args:
        path: of the folder; it is made if there is none.

    Raises:
        PrefixStoreFolderError: the folder cannot be used, or has other files.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._folder = PrefixFolder(path)

    @property
    def path(self) -> Path:
        """Path of the folder."""
        return self._folder.path

    def prompts(self) -> list[StoredPrompt]:
        """
        List the prompts and conversations that no other one continues, the one used last first.

        Raises:
            PrefixStoreFolderError: the folder cannot be read.
        """
        return prompts_of(self._folder)

    def remove(self, stored: StoredPrompt) -> None:
        """
        Remove a prompt, and what of it no other one shares.

        Raises:
            PrefixStoreFolderError: the folder cannot be changed.
            PrefixStoreError: a process reads it now.
        """
        try:
            self._folder.remove_unshared(bytes.fromhex(stored.id))
        except NodeInUseError as error:
            raise PrefixStoreError(f"{stored.name} is not removed: a process reads it now.") from error


def prompts_of(folder: PrefixFolder) -> list[StoredPrompt]:
    """
    List the prompts of a folder, the one used last first.

    Raises:
        PrefixStoreFolderError: the folder cannot be read.
    """
    by_id = {entry.id: entry for entry in folder.entries()}
    continued = {entry.parent for entry in by_id.values()}
    listed = (_stored(folder, entry, by_id) for entry in by_id.values() if entry.id not in continued)
    return [stored for stored in listed if stored is not None]


def _stored(folder: PrefixFolder, entry: Entry, by_id: dict[bytes, Entry]) -> StoredPrompt | None:
    """Return a prompt by its last node; `None` if it is gone by now, or damaged."""
    try:
        keys, description = folder.token_ids(entry.id), NodeDescription.from_bytes(entry.description, with_states=False)
    except (NodeNotFoundError, NodeFileError, ValueError):
        return None
    token_ids = np.concatenate([token_ids_of(keys), np.array(description.rest, np.int64)])
    num_bytes, node = 0, by_id.get(entry.id)
    while node is not None:
        num_bytes += node.num_bytes
        node = None if node.parent is None else by_id.get(node.parent)
    return StoredPrompt(
        entry.id.hex(),
        description.identity,
        description.model_name,
        description.label.title,
        token_ids,
        description.document_tokens or len(token_ids),
        num_bytes,
        entry.last_use,
        description.label.details,
    )
