"""The files of the nodes, one each: who uses one shares its lock, and its time is that of the last use."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .database import NAME, Node
from .errors import PrefixStoreFolderError
from .node_file import SUFFIX
from .private_files import Lock, open_file, try_lock, wait_for_lock


class NodeFolder:
    """The folder of whole files, and that of unfinished ones, each locked by its writer. Others stay."""

    def __init__(self, path: Path, unfinished: Path, lock_seconds: float):
        self.path, self.unfinished, self._lock_seconds = path, unfinished, lock_seconds

    def path_of(self, name: str) -> Path:
        """Return the path of the file of a node."""
        return self.path / f"{name}{SUFFIX}"

    def names(self) -> Iterator[str]:
        """Yield the names of the nodes that have a file."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX)
                if entry.name == name + SUFFIX and NAME.fullmatch(name) and not entry.is_dir(follow_symlinks=False):
                    yield name

    def has_its_size(self, node: Node) -> bool:
        """Return whether the file of a node is there, and as long as it should be."""
        with contextlib.suppress(OSError):
            status = os.lstat(self.path_of(node.name))
            return stat.S_ISREG(status.st_mode) and status.st_size == node.file_bytes
        return False

    def last_use(self, node: Node) -> int:
        """Return when a node was last used, in nanoseconds; 0 if it is gone."""
        with contextlib.suppress(OSError):
            return os.lstat(self.path_of(node.name)).st_mtime_ns
        return 0

    def note_use(self, node: Node) -> None:
        """Note that a node is used now."""
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.path_of(node.name), ns=(now, now))

    def is_in_use(self, node: Node) -> bool:
        """Return whether a reader has the file of a node open; false where there are no locks to tell."""
        try:
            with open_file(self.path_of(node.name), "rb+") as file:
                return try_lock(file, True) is Lock.REFUSED
        except PermissionError:  # Windows refuses what another has open
            return True
        except OSError:  # what is no file is not in use
            return False

    def pin(self, node: Node) -> BinaryIO | None:
        """Open the file of a node, which is in use until that is closed; `None` if it is gone."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open_file(self.path_of(node.name)))
            except FileNotFoundError:
                return None
            if not wait_for_lock(file, False, self._lock_seconds):
                raise PrefixStoreFolderError(self.path, f"has a locked file, {file.name}. Is a process stopped?")
            if not os.fstat(file.fileno()).st_nlink:
                return None
            stack.pop_all()
            return file

    def unlink(self, node: Node, by_force: bool) -> bool:
        """Remove the file of a node, by force one in use, too, which its reader keeps; return whether it is gone."""
        path = self.path_of(node.name)
        try:
            with contextlib.ExitStack() as stack:
                if stat.S_ISREG(os.lstat(path).st_mode):
                    lock = try_lock(stack.enter_context(open_file(path, "rb+")), True)
                    if lock is Lock.REFUSED and not by_force:
                        return False
                    if lock is Lock.NONE_HERE:
                        stack.close()  # Windows removes no open file
                # Who waits for the lock meanwhile finds a file without a name.
                path.unlink()
        except (FileNotFoundError, IsADirectoryError):
            pass
        except PermissionError:
            return path.is_dir()  # Windows refuses what another has open
        return True

    def begin(self, name: str, num_bytes: int) -> BinaryIO:
        """Make an unfinished file of this size, which counts from now on."""
        file = open_file(self.unfinished / name, "xb+")
        try:
            try_lock(file, True)  # nobody else has seen it
            file.truncate(num_bytes)
        except BaseException:
            file.close()
            raise
        return file

    def reserved(self) -> tuple[int, int]:
        """
        Return the bytes of unfinished files, and how many of them are not on the disk yet; remove what nobody writes.

        Where there are no locks nobody can tell, and all stay.
        """
        reserved = unwritten = 0
        for path in self.unfinished.iterdir():
            if not NAME.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError), open_file(path, "rb+") as file:
                if try_lock(file, True) is Lock.HELD:
                    path.unlink()
                    continue
                status = os.fstat(file.fileno())
                reserved += status.st_size
                unwritten += max(0, status.st_size - 512 * getattr(status, "st_blocks", 0))
        return reserved, unwritten
