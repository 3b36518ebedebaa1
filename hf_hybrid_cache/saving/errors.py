"""What is wrong with a file."""

import os

from ..errors import HybridCacheError


class CacheFileError(HybridCacheError, ValueError):
    """A file cannot be written, or is not, or not for this model, the whole and unaltered file of a saved cache."""

    def __init__(self, path: str | os.PathLike[str], reason: str):
        super().__init__(f"{os.fspath(path)} {reason}")
