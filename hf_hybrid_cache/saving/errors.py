"""Errors of the files of saved caches."""

import os

from ..errors import HybridCacheError


class CacheFileError(HybridCacheError, ValueError):
    """
    A file cannot be written, or is not a whole and unaltered cache for this model; the message says why.

    Attributes:
        reason: what is wrong with the file, after its name.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str):
        super().__init__(f"{os.fspath(path)} {reason}")
        self.reason = reason
