"""Finding what is stored of a prompt."""

from dataclasses import dataclass, field, replace

import numpy as np

from ..prefix_folder import Match, PrefixFolder
from .nodes.description import NodeDescription
from .nodes.filling import StoredPart
from .nodes.keys import token_ids_of
from .nodes.states import NodeStates
from .prompts.prompt import Prompt
from .reuse import Reuse


@dataclass(frozen=True)
class Found:
    """
    The stored beginning of a prompt.

    Attributes:
        match: with its nodes in use.
        parts: that are used, in order.
        num_tokens: that they have.
        common_tokens: that the prompt has in common with what is stored.
        stored_token: token id that is stored where the prompt first differs, if any is.
    """

    match: Match = field(default_factory=Match)
    parts: tuple[StoredPart, ...] = ()
    num_tokens: int = 0
    common_tokens: int = 0
    stored_token: int | None = None

    @property
    def last_states(self) -> NodeStates | None:
        """The description of the last node's states."""
        return self.parts[-1].states if self.parts else None

    def without_parts(self) -> "Found":
        """Return the same with nothing to use, nor in use."""
        return replace(self, match=Match(), parts=(), num_tokens=0)

    def reuse(self, prompt: Prompt, folder: PrefixFolder) -> Reuse:
        """Return the report for the user."""
        at, tokens = self.common_tokens, prompt.token_ids[0]
        given = int(tokens[at]) if at < len(tokens) else None
        if given == self.stored_token:  # forward passes ended elsewhere
            given = None
        return Reuse(folder.path, self.num_tokens, at, len(tokens), self.stored_token, given)


def find(folder: PrefixFolder, prompt: Prompt, most_tokens: int | None = None) -> Found:
    """
    Find the longest beginning of a prompt, of at most so many tokens, from which it can be read on.

    Raises:
        PrefixStoreFolderError: the folder cannot be read.
    """
    keys, passes, digest = prompt.keys, prompt.passes, prompt.identity.digest
    match = folder.find(digest, keys)
    common, stored_token = match.num_tokens, _next_token(match)
    if passes.needs_whole_nodes:
        match.close()
        match = folder.find(digest, keys, whole_nodes=True)
    usable = passes.usable(match.num_tokens)
    if most_tokens is not None:
        usable = min(usable, most_tokens)
    if usable != match.num_tokens:
        match.close()
        match = folder.find(digest, keys[:usable], passes.needs_whole_nodes)
    return Found(match, parts_of(match), match.num_tokens, common, stored_token)


def find_all(folder: PrefixFolder, prompt: Prompt) -> Found:
    """
    Find the longest beginning of a prompt that a node may follow, however many tokens it leaves.

    Raises:
        PrefixStoreFolderError: the folder cannot be read.
    """
    match = folder.find(prompt.identity.digest, prompt.keys, prompt.passes.needs_whole_nodes)
    return Found(match, parts_of(match), match.num_tokens)


def parts_of(match: Match) -> tuple[StoredPart, ...]:
    """Return the nodes of a match with their descriptions."""
    described = ((part, NodeDescription.from_bytes(part.file.head.description).states) for part in match.parts)
    return tuple(StoredPart(part.file, states, part.end) for part, states in described if states is not None)


def _next_token(match: Match) -> int | None:
    """Return the token that follows a match in its last node, if any does."""
    if not match.parts:
        return None
    last = match.parts[-1]
    if last.num_tokens == last.file.head.num_tokens:
        return None
    return int(token_ids_of(np.array(last.file.head.token_at(last.num_tokens))))
