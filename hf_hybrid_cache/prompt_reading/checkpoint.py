"""A file in which a cache is kept while its prompt is read."""

import os
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import HybridCache, contents_of, fill_from_file
from ..files import CacheFileError

# The pause between two writes: so many times the time of the last one, and at least so many seconds.
_REST, _LEAST_SECONDS = 30, 60.0


class Checkpoint:
    """
    The file, and the times at which it is written.

    Args:
        path: of the file, there or not.
        cache: that is to be kept.

    Raises:
        TypeError: it is one of transformers' own.
    """

    def __init__(self, path: str | os.PathLike[str], cache: Cache):
        if not isinstance(cache, HybridCache):
            raise TypeError(f"checkpoint= needs a cache that has a file, a HybridCache, got {type(cache).__name__}.")
        self._path = Path(path).absolute()  # the working directory may change
        self._cache, self._peers = cache, contents_of(cache).stores.peers
        self._next = time.monotonic() + _LEAST_SECONDS

    def take_up(self, model: PreTrainedModel, token_ids: torch.Tensor) -> None:
        """
        Fill the cache with what is in the file, if there is one.

        Raises:
            CacheFileError: it is of other tokens than `token_ids`, of another model, or quantized in another way; or of
                several processes that share the cache some have no file.
            ValueError: the cache holds tokens, too.
        """
        are_there = self._told(self._path.exists())
        if not any(are_there):
            return
        if not all(are_there):
            raise CacheFileError(
                self._path,
                f"is there for {sum(are_there)} of the {len(are_there)} processes that share the cache: give all of "
                "them the same file, or none.",
            )
        if held := self._cache.get_seq_length():
            raise ValueError(
                f"{self._path} is there and the cache holds {held:,} tokens: pass a new cache to go on from the file, "
                "or another file."
            )
        try:
            fill_from_file(self._cache, self._path, model.config, model.device, token_ids, model.dtype)
        except CacheFileError as error:
            way_out = "To read the prompt anew, remove the file or name another."
            raise CacheFileError(self._path, f"{error.reason} {way_out}") from error

    def write_if_due(self, token_ids: torch.Tensor, is_last: bool) -> None:
        """Write the cache if it is time, for any process that shares it; the old file stays until this is complete."""
        start = time.monotonic()
        if not any(self._told(is_last or start >= self._next)):
            return
        self._cache.save(self._path, token_ids)
        end = time.monotonic()
        self._next = end + max(_LEAST_SECONDS, _REST * (end - start))

    def _told(self, answer: bool) -> list[bool]:
        """Return the answers of all processes that share the cache, in the order of ranks."""
        if self._peers is None:
            return [answer]
        return [bool(each) for each in self._peers.numbers(int(answer))]
