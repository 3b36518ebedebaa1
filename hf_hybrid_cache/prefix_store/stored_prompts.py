"""The prompts and conversations that a store has, as lists show them."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model_identity import Identity
from ..scalars import as_count
from .errors import NodeInUseError, PrefixStoreError
from .folder import Folder, keys_of
from .keys import MOST_TOKEN_IDS, num_read_tokens, token_ids_of
from .node_files import Head, Node


@dataclass(frozen=True)
class Description:
    """
    The description of a node, as its file has it.

    Attributes:
        document_tokens: of a conversation, those before the first question; 0 of a prompt.
        rest: token ids of a conversation after those that the store has read.
    """

    identity: Identity
    model_name: str
    title: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    document_tokens: int = 0
    rest: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return the description as text, which `from_json` reads; `PrefixStoreError` if JSON lacks some details."""
        try:
            tree = vars(self) | {"identity": self.identity.to_json(), "details": dict(self.details)}
            return json.dumps(tree, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise PrefixStoreError(f"details must be values of JSON by name: {error}.") from error

    @classmethod
    def from_json(cls, text: str) -> "Description":
        """Read what `to_json` wrote; `ValueError` if it is something else."""
        try:
            tree = json.loads(text)
            identity = Identity.from_json(str(tree["identity"]))
            rest = tuple(as_count(token, MOST_TOKEN_IDS) for token in tree["rest"])
            title, details = str(tree["title"]), dict(tree["details"])
            return cls(identity, str(tree["model_name"]), title, details, as_count(tree["document_tokens"]), rest)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"does not describe a node ({type(error).__name__}: {error}).") from error


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
        """The name of a conversation in its details, or else the title, or else the id."""
        given = self.details.get("name") if self.is_conversation else None
        return str(given or self.title or self.id)

    @property
    def is_conversation(self) -> bool:
        """True if it has answers."""
        return self.document_tokens < len(self.token_ids)


class StoredPrompts:
    """
    The prompts and conversations in a folder, to be listed and removed.

    Args:
        path: of the folder; it is made if there is none.
        options: see `Folder`.

    Raises:
        PrefixStoreFolderError: the folder cannot be used, or has other files.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any):
        self._folder = Folder(path, **options)

    @property
    def path(self) -> Path:
        """Path of the folder."""
        return self._folder.path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def prompts(self) -> list[StoredPrompt]:
        """
        List the prompts and conversations that no other one continues, the one used last first.

        Raises:
            PrefixStoreFolderError: the folder cannot be read.
        """
        prompts = []
        for way in self._folder.prompts():
            with contextlib.suppress(ValueError):  # of a description that cannot be read
                prompts.append(_listed(way))
        return prompts

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


def _listed(way: Sequence[tuple[Node, Head]]) -> StoredPrompt:
    """Return the prompt of some nodes; `ValueError` if its description cannot be read."""
    (last, head), keys = way[-1], keys_of(way)
    described, num_read = Description.from_json(head.description), num_read_tokens(keys)
    if num_read + len(described.rest) < len(keys):
        raise ValueError(f"{last.name} does not have the ids of all its tokens.")
    token_ids = np.concatenate([token_ids_of(keys[:num_read]), np.array(described.rest, np.int64)])
    return StoredPrompt(
        last.name,
        described.identity,
        described.model_name,
        described.title,
        token_ids,
        described.document_tokens if described.rest else len(token_ids),
        sum(node.num_bytes for node, _ in way),
        last.last_use / 1e9,
        described.details,
    )
