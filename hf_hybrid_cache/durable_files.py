"""Files that get their name when they are whole and on the disk."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced_when_whole(
    path: Path, unfinished: Path | None = None, opener: Callable[[str, int], int] | None = None
) -> Iterator[BinaryIO]:
    """
    Open a file for writing, which replaces `path` when it is complete and on the disk; else what was there stays.

    Args:
        path: of the file.
        unfinished: path of the file until then, in the same file system; `None` for a hidden one beside it.
        opener: as `open` takes it.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = unfinished or path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        with open(unfinished, "xb", opener=opener) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Not every system opens folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
