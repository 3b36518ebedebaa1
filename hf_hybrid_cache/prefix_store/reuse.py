"""States of prompts between a folder and caches: what is found fills a cache, what is read or said is kept."""

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..cache import HybridCache, contents_of
from ..layers import HybridLayer, tensors_of
from ..processes import Agreement
from ..scalars import num_common_keys
from ..storage import GRANULE
from .errors import NodeInUseError, NodeNotFoundError, PrefixStoreError, PrefixStoreFolderError
from .folder import Folder, Match
from .keys import end_digests, identity_digest, num_read_tokens, token_ids_of
from .node_states import NodeStates, fill, states_since
from .prompt_checks import Prompt
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
        is_kept: whether the store had room for what was read.
    """

    folder: Path
    num_tokens: int
    common_tokens: int
    prompt_tokens: int
    stored_token: int | None
    given_token: int | None
    is_kept: bool = True

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
    with contextlib.ExitStack() as stack:
        match = stack.enter_context(folder.find(digest, keys[:most_tokens]))
        nearest = folder.nearest(digest, keys, match)
        stack.pop_all()
    more = num_common_keys(nearest, keys[match.num_tokens :])
    common = match.num_tokens + more
    stored = int(token_ids_of(nearest)[more]) if more < num_read_tokens(nearest) else None
    given = int(token_ids[common]) if common < len(token_ids) else None
    # Where the tokens are the same, forward passes ended elsewhere.
    different = None if given == stored else given
    return match, Reuse(folder.path, match.num_tokens, common, len(token_ids), stored, different)


def find_all(folder: Folder, prompt: Prompt) -> tuple[Match, NodeStates | None]:
    """Find the longest beginning that a node may follow, however many tokens it leaves, and what its end holds."""
    while True:
        match = folder.find(prompt.identity.digest, prompt.keys)
        if not match.nodes:
            return match, None
        try:
            file, head = match.nodes[-1].open()
            with file:
                return match, NodeStates.from_json(head.states)
        except ValueError:
            match.close()
            if not _removed_damaged(folder, match):
                raise


def take_over(
    folder: Folder, prompt: Prompt, agreement: Agreement, at_least: int
) -> tuple[Match, NodeStates | None, Reuse]:
    """
    Fill the cache of a prompt with what is stored of it, and return that, with what its end holds; and report.

    Nothing is taken if that is less than `at_least` tokens. States that cannot be read are not used. Processes that
    share the cache use as many tokens: the most that all of them find and can read. After an error the cache is empty.
    """
    most: int | None = None

    def states_now(match: Match) -> NodeStates | None:
        """Fill the cache; if the states cannot be read, those of fewer tokens are looked for next."""
        nonlocal most
        if not match.num_tokens:
            return None
        try:
            return fill(prompt.contents, match)
        except ValueError as error:
            match.close()
            most, what = match.num_tokens - 1, "not used"
            # Those that fit their checksums go, too, so that they are kept again. What cannot be changed stays.
            with contextlib.suppress(NodeNotFoundError, NodeInUseError, PrefixStoreFolderError):
                if _removed_damaged(folder, match):
                    return None
                folder.remove(match.nodes[-1].name)
                what = "not used, and removed"
            warnings.warn(f"States of {match.num_tokens:,} tokens are {what}: {error}", stacklevel=6)
            return None

    while True:
        (match, reuse), counts = agreement.numbers(
            partial(find, folder, prompt, most), lambda found: found[0].num_tokens
        )
        is_used, states = False, None
        try:
            if min(counts) < max(counts):
                most = min(counts)
                continue
            if match.num_tokens < at_least:
                return Match(), None, reuse
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
    wanted = prompt.token_ids[0].numpy()
    for each in stored:
        differences = prompt.identity.differences(each.identity)
        reason = "; ".join(differences) or "no pass ended there, or they are answers of a conversation"
        common = num_common_keys(each.token_ids, wanted)
        if common > lines.get(reason, num_tokens):
            lines[reason] = common
    longest_first = sorted(lines.items(), key=lambda line: -line[1])
    return [f"{common:,} tokens are stored and not used: {reason}" for reason, common in longest_first]


class Keeper:
    """Keeps the states of a prompt after those of `end` tokens, pass by pass as long as there is room, or at once."""

    def __init__(self, folder: Folder, prompt: Prompt, end: int, before: NodeStates | None):
        self._folder, self._prompt = folder, prompt
        self._end, self._before = end, before
        self._is_keeping, self.has_failed = True, False

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
            self._is_keeping, self.has_failed = False, True
            beyond = f" beyond {self._end:,} tokens" if self._end else ""
            warnings.warn(f"The prompt is read, and not kept{beyond}: {error}", stacklevel=5)

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
    for layer in contents.layers:
        if isinstance(layer, HybridLayer):
            layer.join()
    if replaces is not None:
        with contextlib.suppress(NodeNotFoundError, NodeInUseError):  # nothing is left to remove, or it stays
            before = folder.keys(replaces)
            common = num_common_keys(before, keys)
            if common < len(before):  # turns were taken back
                stays = before[: max(common, num_read_tokens(before))]
                folder.remove_unshared(replaces, end_digests(identity_digest(identity), stays))
    if num_read_tokens(known := contents.keys(identity)) == len(keys):  # all questions were taken back
        with folder.find(identity, known) as match:
            if match.num_tokens == len(keys):
                return match.nodes[-1].name
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


def _removed_damaged(folder: Folder, match: Match) -> bool:
    """Remove those nodes of a match that are damaged; return whether there were any."""
    return any(folder.remove_damaged(node.name) for node in match.nodes)
