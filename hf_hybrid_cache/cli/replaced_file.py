"""A file that a cache is to be kept in, and what is there already."""

import os
from pathlib import Path

from ..saving import CacheFile, CacheFileError
from .console import UsageError


def what_is_replaced(path: Path, is_forced: bool, way_out: str) -> str | None:
    """
    What a new file of a cache takes the place of, in words; `None` if nothing is there.

    Args:
        path: of the new file.
        is_forced: whether it may take the place of any file, not of a cache's alone.
        way_out: what to type for that.

    Raises:
        UsageError: something else is there.
    """
    if not os.path.lexists(path) or path.is_dir():  # a folder is refused by who writes
        return None
    if not path.is_file():
        raise UsageError(f"{path} is no regular file, so no cache can be kept there: use another name.")
    try:
        with CacheFile(path):
            return "the cache that was kept there"
    except CacheFileError as error:
        if is_forced:
            return "the file that was there"
        raise UsageError(f"{error} It is not replaced: use another name, or {way_out}.") from error
