"""Files that are being written, each locked by its writer until it is renamed."""

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import BinaryIO

from .files import open_file
from .locks import Lock, try_lock

_NAME_BYTES = 16
_NAME = re.compile(f"[0-9a-f]{{{2 * _NAME_BYTES}}}")


class Unfinished:
    """
    The folder of the files that are being written. Only for the holder of the store's lock.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path):
        self.path = path

    def new_path(self) -> Path:
        """Return a path that no other file has."""
        return self.path / secrets.token_hex(_NAME_BYTES)

    def begin(self, num_bytes: int) -> tuple[Path, BinaryIO]:
        """
        Make a locked file of this size, which counts from now on.

        Raises:
            OSError: it cannot be made.
        """
        path = self.new_path()
        file = open_file(path, "xb+")
        try:
            try_lock(file, True)  # nobody else has seen it
            file.truncate(num_bytes)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        return path, file

    def reserved(self) -> tuple[int, int]:
        """
        Return the bytes of all files, and how many of them are not on the disk yet; remove what nobody writes.

        Where there are no locks nobody can tell, and all stay. Files with other names are no concern of ours.
        """
        reserved = unwritten = 0
        for path in self.path.iterdir():
            if not _NAME.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError), open_file(path, "rb+") as file:
                if try_lock(file, True) is Lock.HELD:
                    path.unlink()
                    continue
                status = os.fstat(file.fileno())
                reserved += status.st_size
                unwritten += max(0, status.st_size - 512 * getattr(status, "st_blocks", 0))
        return reserved, unwritten
