"""Finding what is stored of a prompt, and filling its cache with it."""

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..cache import HybridCache, contents_of
from ..processes import Agreement
from .errors import NodeInUseError, NodeNotFoundError, PrefixStoreFolderError
from .filling import fill, states_of
from .folder import Folder, Match
from .keys import as_bytes, num_common, num_read_tokens, token_ids_of
from .prompt import Prompt
from .states import NodeStates
from .stored_prompts import StoredPrompt


@dataclass(frozen=True)
class Reuse:
    """
    A report of the tokens of a prompt that came from a store.

    Attributes:
        folder: of the store.
        num_tokens: tokens of the prompt that came from it.
        common_tokens: tokens that the prompt has in common with what is stored, which may be more: states go on only
            from where a forward pass ended.
        prompt_tokens: of the prompt.
        stored_token: token id that is stored where the prompt first differs; `None` if nothing is, or it is of an
            answer.
        given_token: token id of the prompt there; `None` if it ends there.
    """

    folder: Path
    num_tokens: int
    common_tokens: int
    prompt_tokens: int
    stored_token: int | None
    given_token: int | None

    def __str__(self) -> str:
        return self.text()

    def text(self, token_text: Callable[[int], str] = str) -> str:
        """
        Return the report in one line.

        Args:
            token_text: the text of a token id.
        """
        text = f"{self.num_tokens:,} of {self.prompt_tokens:,} tokens from {self.folder}"
        if self.stored_token is None or self.given_token is None:
            return text
        return (
            f"{text}, the first difference at token {self.common_tokens:,}: {token_text(self.given_token)} instead of "
            f"{token_text(self.stored_token)}"
        )


def find(folder: Folder, prompt: Prompt, most_tokens: int | None = None) -> tuple[Match, Reuse]:
    """Find the longest beginning of a prompt, of at most so many tokens, from which it can be read on; and report."""
    keys, digest, token_ids = prompt.keys, prompt.identity.digest, prompt.token_ids[0]
    with folder.find(digest, keys) as match:
        nearest = folder.nearest(digest, keys, match)
        more = num_common(as_bytes(nearest), as_bytes(keys[match.num_tokens :]))
        common = match.num_tokens + more
    stored = int(token_ids_of(nearest)[more]) if more < num_read_tokens(nearest) else None
    given = int(token_ids[common]) if common < len(token_ids) else None
    # Where the tokens are the same, forward passes ended elsewhere.
    different = None if given == stored else given
    match = folder.find(digest, keys[:most_tokens])
    return match, Reuse(folder.path, match.num_tokens, common, len(token_ids), stored, different)


def find_all(folder: Folder, prompt: Prompt) -> tuple[Match, NodeStates | None]:
    """Find the longest beginning that a node may follow, however many tokens it leaves, and what its end holds."""
    while True:
        match = folder.find(prompt.identity.digest, prompt.keys)
        if not match.parts:
            return match, None
        try:
            with match.parts[-1].open() as file:
                return match, states_of(file)
        except ValueError:
            match.close()
            if not _removed_damaged(folder, match):
                raise


def take_over(folder: Folder, prompt: Prompt, agreement: Agreement) -> tuple[Match, NodeStates | None, Reuse]:
    """
    Fill the cache of a prompt with what is stored of it, and return that, with what its end holds; and report.

    States that cannot be read are not used. Processes that share the cache use as many tokens: the most that all of
    them find and can read. After an error the cache is empty.
    """
    failed: set[str] = set()
    most: int | None = None

    def found_now() -> tuple[Match, Reuse]:
        """Return what is stored, of at most so many tokens; nothing if its last node is a failed one."""
        match, reuse = find(folder, prompt, most)
        if match.parts and match.parts[-1].node.name in failed:
            match.close()
            return Match(), replace(reuse, num_tokens=0)
        return match, reuse

    def states_now(match: Match) -> NodeStates | None:
        """Fill the cache; if the states cannot be read, note their last node."""
        if not match.num_tokens:
            return None
        try:
            return fill(prompt.contents, match.parts)
        except ValueError as error:
            match.close()
            failed.add(last := match.parts[-1].node.name)
            if not _removed_damaged(folder, match):
                # So that they are kept again.
                with contextlib.suppress(NodeNotFoundError, NodeInUseError, PrefixStoreFolderError):
                    folder.remove(last)
                warnings.warn(f"States of {match.num_tokens:,} tokens are not used, and removed: {error}", stacklevel=6)
            return None

    while True:
        (match, reuse), counts = agreement.numbers(found_now, lambda found: found[0].num_tokens)
        is_used, states = False, None
        try:
            if min(counts) < max(counts):
                most = min(counts)
                continue
            if match.num_tokens:
                states, are_filled = agreement.numbers(partial(states_now, match), lambda states: states is not None)
                if not all(are_filled):
                    continue
                prompt.cache.note_tokens(prompt.token_ids[:, : match.num_tokens])
                prompt.contents.note_keys(prompt.identity.digest, prompt.keys[: match.num_tokens])
            is_used = True
            return match, states, reuse
        finally:
            if not is_used:
                match.close()
                empty(prompt.cache)


def empty(cache: HybridCache) -> None:
    """Empty a cache that was new, and let it choose its codecs again."""
    stores = contents_of(cache).stores
    cache.reset()
    stores.take_codecs(stores.asked_codecs)


def obstacles(stored: Iterable[StoredPrompt], prompt: Prompt, num_tokens: int) -> list[str]:
    """Return lines on stored prompts with more than `num_tokens` of a prompt's first tokens, which are not used."""
    lines: dict[str, int] = {}
    wanted = as_bytes(prompt.token_ids[0].numpy())
    for each in stored:
        differences = prompt.identity.differences(each.identity)
        reason = "; ".join(differences) or "no pass ended there, or they are answers of a conversation"
        common = num_common(as_bytes(each.token_ids), wanted)
        if common > lines.get(reason, num_tokens):
            lines[reason] = common
    return [f"{common:,} tokens are stored and not used: {reason}" for reason, common in lines.items()]


def _removed_damaged(folder: Folder, match: Match) -> bool:
    """Remove those nodes of a match that are damaged; return whether there were any."""
    return any(folder.remove_damaged(part.node.name) for part in match.parts)
