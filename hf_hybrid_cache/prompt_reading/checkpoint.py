"""A file in which a cache is kept while its prompt is read."""

import os
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import HybridCache

# Between two times, in times of what writing took; and at least.
_REST, _LEAST_SECONDS = 30, 60.0


class Checkpoint:
    """
    The file, and when it is due.

    Args:
        path: of the file, there or not.
        cache: that is to be kept.

    Raises:
        TypeError: it is one of transformers' own.
    """

    def __init__(self, path: str | os.PathLike[str], cache: Cache):
        if not isinstance(cache, HybridCache):
            raise TypeError(f"checkpoint= needs a cache that has a file, a HybridCache, got {type(cache).__name__}.")
        self._path, self._cache = Path(path), cache
        self._next = time.monotonic() + _LEAST_SECONDS

    def taken_up(self, model: PreTrainedModel, token_ids: torch.Tensor) -> Cache:
        """
        The cache that is in the file, or the given one if there is no file.

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
        return HybridCache.load(self._path, model.config, device=model.device, token_ids=token_ids, dtype=model.dtype)

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def write(self, cache: Cache, token_ids: torch.Tensor) -> None:
        """Keep what there is; the file of before stays until it is whole."""
        assert isinstance(cache, HybridCache)
        start = time.monotonic()
        cache.save(self._path, token_ids)
        end = time.monotonic()
        self._next = end + max(_LEAST_SECONDS, _REST * (end - start))
