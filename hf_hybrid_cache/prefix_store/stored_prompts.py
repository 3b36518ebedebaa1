"""The prompts and conversations that a store has, as lists show them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model_identity import Identity
from .description import Description
from .errors import NodeInUseError, PrefixStoreError
from .folder import Entry, Folder
from .keys import KEY_BYTES, as_keys, token_ids_of
from .node_file import Head


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
        max_bytes: the most that it may take; `None` for no limit but the disk's.
        min_free_bytes: what stays free on the disk.
        require_readable: see `Folder`.

    Raises:
        PrefixStoreFolderError: the folder cannot be used, or has other files.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int | None = None,
        min_free_bytes: int = 2**30,
        require_readable: Callable[[Head], object] = lambda head: None,
    ):
        self._folder = Folder(
            path, max_bytes=max_bytes, min_free_bytes=min_free_bytes, require_readable=require_readable
        )

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
        entries = self._folder.entries()
        by_id, continued = {each.node.id: each for each in entries}, {each.node.parent for each in entries}
        found = (_listed(entry, by_id) for entry in entries if entry.node.id not in continued)
        return [prompt for prompt in found if prompt is not None]

    def remove(self, stored: StoredPrompt) -> None:
        """
        Remove a prompt, and what of it no other one shares.

        Raises:
            PrefixStoreFolderError: the folder cannot be changed.
            PrefixStoreError: a process reads it now.
        """
        try:
            self._folder.remove_unshared(stored.id)
        except NodeInUseError as error:
            raise PrefixStoreError(f"{stored.name} is not removed: a process reads it now.") from error


def _listed(last: Entry, by_id: Mapping[int, Entry]) -> StoredPrompt | None:
    """Return a prompt by its last node; `None` if one is gone by now, or what describes it cannot be read."""
    way = [last.node]
    while (parent := by_id.get(way[-1].parent or 0)) is not None:
        way.append(parent.node)
    try:
        described = Description.from_json(last.description)
    except ValueError:
        return None
    keys = bytearray()
    for node in reversed(way):
        keys[node.start * KEY_BYTES :] = node.keys
    if way[-1].start:
        return None
    token_ids = np.concatenate([token_ids_of(as_keys(bytes(keys))), np.array(described.rest, np.int64)])
    return StoredPrompt(
        last.node.name,
        described.identity,
        described.model_name,
        described.title,
        token_ids,
        described.document_tokens or len(token_ids),
        sum(node.file_bytes for node in way),
        last.last_use,
        described.details,
    )
