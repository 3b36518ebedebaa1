"""Errors of the folder of a prefix store."""

import os

from ..errors import HybridCacheError


class PrefixStoreFolderError(HybridCacheError, OSError):
    """
    The folder of a store cannot be read, written or locked; the message says why.

    Attributes:
        reason: what is wrong, after the name of the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], reason: str):
        super().__init__(f"{os.fspath(folder)} {reason}")
        self.reason = reason


class PrefixFolderFullError(PrefixStoreFolderError):
    """A prompt does not fit the limit of the store, or the disk, even without what may be removed."""


class NodeFileError(HybridCacheError, ValueError):
    """
    A file of the store is not whole, was altered, or is another one; the message says why.

    Attributes:
        reason: what is wrong with the file, after its name.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str):
        super().__init__(f"{os.fspath(path)} {reason}")
        self.reason = reason


class UnreadableNodeError(NodeFileError):
    """A file of the store is whole, and what it says cannot be read here; another version may read it."""


class NodeNotFoundError(HybridCacheError, LookupError):
    """The store has no such node, or not any more."""


class NodeInUseError(HybridCacheError, RuntimeError):
    """A node cannot be removed, because it or one that continues it is in use."""


class IndexFileError(HybridCacheError, ValueError):
    """The index is missing, was altered, or is of another version; it is made again from the nodes."""


class TokenIdsError(HybridCacheError, ValueError):
    """These are no token ids of one prompt."""
