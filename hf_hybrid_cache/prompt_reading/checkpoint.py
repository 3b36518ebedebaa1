"""A file in which a cache is kept while its prompt is read."""

import os
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import HybridCache
from ..saving import CacheFileError

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
        self._path, self._cache = Path(path).absolute(), cache  # the working directory may change
        self._next = time.monotonic() + _LEAST_SECONDS

    def taken_up(self, model: PreTrainedModel, token_ids: torch.Tensor) -> Cache:
        """
        Return the cache that is in the file, or the given one if there is no file.

        Raises:
            CacheFileError: it is of other tokens than `token_ids`, or of another model.
            ValueError: the given cache holds tokens, too.
        """
        if not self._path.exists():
            return self._cache
        if held := self._cache.get_seq_length():
            raise ValueError(
                f"{self._path} is there and the cache holds {held:,} tokens: pass a new cache to go on from the file, "
                "or another file."
            )
        try:
            return HybridCache.load(
                self._path, model.config, device=model.device, token_ids=token_ids, dtype=model.dtype
            )
        except CacheFileError as error:
            way_out = "To read the prompt anew, remove the file or name another."
            raise CacheFileError(self._path, f"{error.reason} {way_out}") from error

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def write(self, cache: Cache, token_ids: torch.Tensor) -> None:
        """Write the cache; the old file stays until the new one is complete."""
        assert isinstance(cache, HybridCache)
        start = time.monotonic()
        cache.save(self._path, token_ids)
        end = time.monotonic()
        self._next = end + max(_LEAST_SECONDS, _REST * (end - start))
