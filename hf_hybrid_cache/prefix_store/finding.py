"""Finding what is stored of a prompt, and filling its cache with it."""

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from ..cache import HybridCache, contents_of
from ..processes import Agreement
from .errors import NodeInUseError, NodeNotFoundError, PrefixStoreFolderError
from .filling import fill, states_of
from .folder import Folder, Match
from .keys import as_bytes, as_keys, num_common, token_ids_of
from .prompt import Prompt
from .reuse import Reuse
from .states import NodeStates
from .stored_prompts import StoredPrompt


@dataclass(frozen=True)
class Found:
    """
    The stored beginning of a prompt.

    Attributes:
        match: with its nodes in use.
        common_tokens: that the prompt has in common with what is stored.
        stored_token: token id that is stored where the prompt first differs, if any is.
        states: of the last node, once they were read.
    """

    match: Match = field(default_factory=Match)
    common_tokens: int = 0
    stored_token: int | None = None
    states: NodeStates | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that can be used."""
        return self.match.num_tokens

    def reuse(self, prompt: Prompt, folder: Folder) -> Reuse:
        """Return the report for the user."""
        at, tokens = self.common_tokens, prompt.token_ids[0]
        given = int(tokens[at]) if at < len(tokens) else None
        if given == self.stored_token:  # forward passes ended elsewhere
            given = None
        return Reuse(folder.path, self.num_tokens, at, len(tokens), self.stored_token, given)


def find(folder: Folder, prompt: Prompt, most_tokens: int | None = None) -> Found:
    """Find the longest beginning of a prompt, of at most so many tokens, from which it can be read on."""
    keys, passes, digest = prompt.keys, prompt.passes, prompt.identity.digest
    match = folder.find(digest, keys)
    following = match.parts[-1].following_keys if match.parts else b""
    stored_token = int(token_ids_of(as_keys(following))[0]) if following else None
    found = Found(match, match.num_tokens, stored_token)
    if passes.needs_whole_nodes:
        match.close()
        match = folder.find(digest, keys, whole_nodes=True)
    usable = passes.usable(match.num_tokens)
    if most_tokens is not None:
        usable = min(usable, most_tokens)
    if usable != match.num_tokens:
        match.close()
        match = folder.find(digest, keys[:usable], passes.needs_whole_nodes)
    return replace(found, match=match)


def find_all(folder: Folder, prompt: Prompt) -> Found:
    """Find the longest beginning of a prompt that a node may follow, however many tokens it leaves, with its states."""
    while True:
        match = folder.find(prompt.identity.digest, prompt.keys, prompt.passes.needs_whole_nodes)
        try:
            states = None
            if match.parts:
                with match.parts[-1].open() as file:
                    states = states_of(file)
            return Found(match, match.num_tokens, states=states)
        except ValueError:
            match.close()
            if not _removed_damaged(folder, match):
                raise


def take_over(folder: Folder, prompt: Prompt, agreement: Agreement) -> Found:
    """
    Fill the cache of a prompt with what is stored of it; states that cannot be read are not used.

    Processes that share the cache use as many tokens: the most that all of them find and can read.

    Raises:
        PrefixStoreError: another process raises an error.
        PrefixStoreFolderError: the folder cannot be read.
        HostMemoryError: host memory would not suffice; the cache is empty then.
    """
    failed: set[str] = set()
    most: int | None = None

    def found_now() -> Found:
        """Return what is stored, of at most so many tokens; nothing if its last node is a failed one."""
        found = find(folder, prompt, most)
        if found.match.parts and found.match.parts[-1].node.name in failed:
            found.match.close()
            return replace(found, match=Match())
        return found

    def states_now(found: Found) -> NodeStates | None:
        """Fill the cache; if the states cannot be read, note their last node."""
        if not found.num_tokens:
            return None
        try:
            return fill(prompt.contents, found.match.parts)
        except ValueError as error:
            found.match.close()
            failed.add(last := found.match.parts[-1].node.name)
            if not _removed_damaged(folder, found.match):
                # So that they are kept again.
                with contextlib.suppress(NodeNotFoundError, NodeInUseError, PrefixStoreFolderError):
                    folder.remove(last)
                warnings.warn(f"States of {found.num_tokens:,} tokens are not used, and removed: {error}", stacklevel=6)
            return None

    while True:
        found, counts = agreement.numbers(found_now, lambda found: found.num_tokens)
        is_used = False
        try:
            if min(counts) < max(counts):
                most = min(counts)
                continue
            if found.num_tokens:
                states, are_filled = agreement.numbers(partial(states_now, found), lambda states: states is not None)
                if not all(are_filled):
                    continue
                found = replace(found, states=states)
                prompt.cache.note_tokens(prompt.token_ids[:, : found.num_tokens])
            is_used = True
            return found
        finally:
            if not is_used:
                found.match.close()
                empty(prompt.cache)


def empty(cache: HybridCache) -> None:
    """Empty a cache that was new, and let it choose its codecs again."""
    stores = contents_of(cache).stores
    cache.reset()
    stores.take_codecs(stores.asked_codecs)


def obstacles(stored: Iterable[StoredPrompt], prompt: Prompt, num_tokens: int) -> list[str]:
    """Return lines on stored prompts with more than `num_tokens` of a prompt's first tokens, which are not used."""
    lines: dict[str, int] = {}
    of_the_same = (
        "no pass ended there, or they are answers of a conversation"
        if prompt.passes.needs_whole_nodes
        else "they are answers of a conversation, or leave the next pass too short"
    )
    wanted = as_bytes(prompt.token_ids[0].numpy())
    for each in stored:
        reason = "; ".join(prompt.identity.differences(each.identity)) or of_the_same
        common = num_common(as_bytes(each.token_ids), wanted)
        if common > lines.get(reason, num_tokens):
            lines[reason] = common
    return [f"{common:,} tokens are stored and not used: {reason}" for reason, common in lines.items()]


def _removed_damaged(folder: Folder, match: Match) -> bool:
    """Remove those nodes of a match that are damaged; return whether there were any."""
    return any(folder.remove_damaged(part.node.name) for part in match.parts)
