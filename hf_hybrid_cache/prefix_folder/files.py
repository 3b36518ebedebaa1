"""Private files: opening, writing, and having them on the disk."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import HybridCacheError
from .errors import PrefixStoreFolderError

FOLDER_MODE, FILE_MODE = 0o700, 0o600
# A link is not followed, and a pipe does not wait for its other end. Windows knows neither, and has a text mode.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
# Errors of the file itself, and not of the process or of the folder.
_OF_THE_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EIO}


def open_file(path: Path, mode: str = "rb") -> BinaryIO:
    """
    Open a file without a buffer; `xb+` makes a new one, and `ab+` makes it if there is none. A pipe is empty.

    Raises:
        OSError: it cannot be opened, or is a link, a folder, or a socket.
    """
    return cast(BinaryIO, open(path, mode, buffering=0, opener=private))


def private(path: str, flags: int) -> int:
    """Open a file as `open_file` does, for `open`."""
    return os.open(path, flags | _FLAGS, FILE_MODE)


def make_own_folder(path: Path) -> bool:
    """
    Make a private folder, if there is none; return whether what is there is a folder of this user, and no link to one.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(FOLDER_MODE)
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "geteuid") or status.st_uid == os.geteuid())


def is_damage(error: OSError) -> bool:
    """Whether a file cannot be read because of what it is, so that it can only be removed."""
    return error.errno in _OF_THE_FILE


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of the data, which the system may take in parts."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def read_all(file: BinaryIO, num_bytes: int) -> bytes:
    """Read so many bytes, which the system may give in parts; fewer where the file ends."""
    parts = []
    while num_bytes and (part := file.read(num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def sync(file: BinaryIO) -> None:
    """Wait until a file is on the disk."""
    os.fsync(file.fileno())


@contextmanager
def reported(folder: Path, what: str) -> Iterator[None]:
    """
    Tell of errors of the system with the name of a folder.

    Args:
        folder: of the files.
        what: what cannot be done, after the name of the folder.

    Raises:
        PrefixStoreFolderError: the system raised an error.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, HybridCacheError):
            raise
        raise PrefixStoreFolderError(folder, f"{what}: {error.strerror or error}.") from error
