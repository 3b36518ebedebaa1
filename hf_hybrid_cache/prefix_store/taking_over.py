"""Filling the cache of a prompt with what is stored of it."""

import warnings
from functools import partial

from ..cache import HybridCache, contents_of
from ..prefix_folder import PrefixFolder
from .agreement import Agreement
from .lookup import Found, find
from .nodes.filling import fill
from .prompts.prompt import Prompt


def taken_over(folder: PrefixFolder, prompt: Prompt, agreement: Agreement) -> Found:
    """
    Fill the cache of a prompt with what is stored of it; states that cannot be read are not used.

    Processes that share the cache use as many tokens: the most that all of them find and can read.

    Raises:
        PrefixStoreError: another process raises an error.
        PrefixStoreFolderError: the folder cannot be read.
        HostMemoryError: host memory would not suffice; the cache is empty then.
    """
    failed: set[bytes] = set()
    most: int | None = None
    while True:
        found, counts = agreement.numbers(partial(_found, folder, prompt, most, failed), _num_tokens)
        is_used = False
        try:
            if min(counts) < max(counts):
                most = min(counts)
                continue
            if found.num_tokens:
                _, are_filled = agreement.numbers(partial(_is_filled, folder, prompt, found, failed), int)
                if not all(are_filled):
                    continue
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


def _found(folder: PrefixFolder, prompt: Prompt, most_tokens: int | None, failed: set[bytes]) -> Found:
    """Return what is stored of a prompt, of at most so many tokens; nothing if its last node is a failed one."""
    found = find(folder, prompt, most_tokens)
    if found.parts and found.parts[-1].file.head.id in failed:
        found.match.close()
        return found.without_parts()
    return found


def _num_tokens(found: Found) -> int:
    return found.num_tokens


def _is_filled(folder: PrefixFolder, prompt: Prompt, found: Found, failed: set[bytes]) -> bool:
    """Fill the cache of a prompt; return false if the states cannot be read, and note their last node."""
    try:
        fill(prompt.contents, found.parts)
    except ValueError as error:
        found.match.close()
        ids = [part.file.head.id for part in found.parts]
        failed.add(ids[-1])
        were_damaged = [folder.remove_damaged(own_id) for own_id in ids]
        if not any(were_damaged):
            warnings.warn(f"States of {found.num_tokens:,} tokens are not used: {error}", stacklevel=6)
        return False
    return True
