"""
Private files, and the locks of the system on them, which end with the process that holds them.

Locks are those of `flock`: between processes of one machine, between threads that opened the file each for itself, and
on NFS between machines where the server has locks. Windows and some file systems have none; then a lock is never
refused, and processes must take turns by themselves.
"""

import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import HybridCacheError
from .errors import PrefixStoreFolderError

if sys.platform != "win32":
    import fcntl

_FILE_MODE = 0o600
# A link is not followed, and a pipe does not wait for its other end. Windows knows neither, and has a text mode.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
# EBADF: NFS has no lock for one alone of what is open for reading.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF}
_FIRST_WAIT, _LONGEST_WAIT = 0.0005, 0.02


class Lock(Enum):
    """The result of asking for a lock."""

    HELD = "held"
    REFUSED = "held by another"
    NONE_HERE = "there are no locks here"


def open_file(path: Path, mode: str = "rb") -> BinaryIO:
    """Open a private file without a buffer, and no link, folder or socket; `xb+` makes a new one. A pipe is empty."""
    return cast(BinaryIO, open(path, mode, buffering=0, opener=_private))


def _private(name: str, flags: int) -> int:
    return os.open(name, flags | _FLAGS, _FILE_MODE)


def is_own(folder: Path) -> bool:
    """Return whether a folder is one of this user, and no link."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "geteuid") or status.st_uid == os.geteuid())


def try_lock(file: BinaryIO | int, exclusive: bool) -> Lock:
    """Ask for the lock of an open file, alone or beside others that share it."""
    if sys.platform == "win32":
        return Lock.NONE_HERE
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.REFUSED
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return Lock.NONE_HERE
        raise
    return Lock.HELD


def wait_for_lock(file: BinaryIO | int, exclusive: bool, seconds: float) -> bool:
    """
    Wait for the lock of an open file, alone or beside others; return false if another refuses it for so many seconds.

    `flock` itself would wait without end, for a stopped process too.
    """
    end, wait = time.monotonic() + seconds, _FIRST_WAIT
    while try_lock(file, exclusive) is Lock.REFUSED:
        if time.monotonic() > end:
            return False
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
    return True


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of a file alone, which is made if there is none; not every system has locks."""
    with open_file(path, "ab") as file:
        if not wait_for_lock(file, True, seconds):
            raise PrefixStoreFolderError(
                path.parent, f"has been locked by another process for {seconds} s. Is one stopped?"
            )
        yield


@contextmanager
def reported(folder: Path, what: str) -> Iterator[None]:
    """Raise errors of the system as `PrefixStoreFolderError`, with what cannot be done after the name of the folder."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HybridCacheError):
            raise
        raise PrefixStoreFolderError(folder, f"{what}: {error.strerror or error}.") from error
