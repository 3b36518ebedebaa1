"""Files that get their name when they are whole and on the disk."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_GROUP_BITS = 0o070


@contextmanager
def replaced_when_whole(path: Path) -> Iterator[BinaryIO]:
    """
    Open a file for writing, which replaces the file at `path` when it is complete and on the disk; else that stays.

    A link stays, and the file that it leads to is replaced. Permissions, and the owner where the system allows it,
    stay; those of a new file are usual. Where the file system has files without a name (Linux), not even a process that
    is killed leaves an unfinished one.

    Raises:
        OSError: it cannot be written, or there is something else than a file, such as a folder, a device or a pipe.
    """
    before = _status_of(path)
    path = Path(os.path.realpath(path))
    unfinished = path.parent / f".{secrets.token_hex(8)}.tmp"
    mode = 0o666 if before is None else 0o600
    try:
        nameless = _opened_without_name(path.parent, mode)
        with nameless or open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            _take_permissions(file, before)
            file.flush()
            os.fsync(file.fileno())
            if nameless is not None:
                _give_name(file, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def _status_of(path: Path) -> os.stat_result | None:
    """Return the status of the file that a path or link leads to, `None` for none; refuse what keeps no content."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "It is a device, a pipe or a socket, not a file", os.fspath(path))
    return status


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Not every system opens folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _opened_without_name(folder: Path, mode: int) -> BinaryIO | None:
    """Open a new file that has no name yet; `None` where the system, or the file system, has no such files."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, mode)
    except OSError:  # what is wrong, if anything is, a named file will tell
        return None
    return open(handle, "wb")


def _give_name(file: BinaryIO, path: Path) -> None:
    """Give a name to a file without one."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # With a folder's handle Python follows the link in /proc, which is how the system knows the file.
        os.link(f"/proc/self/fd/{file.fileno()}", path.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _take_permissions(file: BinaryIO, before: os.stat_result | None) -> None:
    """Give a file the permissions, and if possible the owner and the group, of the one that it replaces."""
    if before is None or not hasattr(os, "fchmod"):
        return
    for owner in ((-1, before.st_gid), (before.st_uid, -1)):
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), *owner)
    mode = stat.S_IMODE(before.st_mode)
    if os.fstat(file.fileno()).st_gid != before.st_gid:
        mode &= ~_GROUP_BITS  # they were meant for another group
    os.fchmod(file.fileno(), mode)
