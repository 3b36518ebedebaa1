"""The file that a saved cache replaces."""

import os
from pathlib import Path

from ..saving import CacheFile, CacheFileError
from .console import UsageError


def replaced_file(path: Path, is_forced: bool, way_out: str) -> str | None:
    """
    Name the kind of file that a saved cache would replace; `None` if there is no file.

    Args:
        path: the cache is written to it.
        is_forced: whether a file that is not a cache may be replaced.
        way_out: tells the user how to force it.

    Raises:
        UsageError: there is a file that is not a cache, and `is_forced` is false.
    """
    if not os.path.isfile(path):  # writing to anything else fails with its own message
        return None
    try:
        with CacheFile(path):
            return "the cache that was kept there"
    except CacheFileError as error:
        if is_forced:
            return "the file that was there"
        raise UsageError(f"{error} It is not replaced: use another name, or {way_out}.") from error
