"""Errors of the prefix store."""

import os

from ..errors import HybridCacheError


class PrefixStoreError(HybridCacheError, ValueError):
    """A prompt of this kind, or of this model or cache, cannot be kept; the message says why, and the way out."""


class PrefixStoreFolderError(HybridCacheError, OSError):
    """
    The folder of a store cannot be read, written or locked; the message says why.

    Attributes:
        reason: what is wrong, after the name of the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], reason: str):
        super().__init__(f"{os.fspath(folder)} {reason}")
        self.reason = reason


class PrefixStoreFullError(PrefixStoreFolderError):
    """A prompt does not fit the limit of the store, or the disk, even without what may be removed."""


class NodeNotFoundError(HybridCacheError, LookupError):
    """The store has no such node, or not any more."""


class NodeInUseError(HybridCacheError, RuntimeError):
    """A node cannot be removed, because it or one that continues it is in use."""
