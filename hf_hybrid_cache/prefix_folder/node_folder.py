"""
The files of the nodes, one each.

Who uses a node shares the lock of its file; the time of the file is that of the last use.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .errors import NodeFileError, PrefixStoreFolderError, UnreadableNodeError
from .files import is_damage, open_file, reported
from .locks import Lock, try_lock, wait_for_lock
from .node_file import NO_PARENT, SUFFIX, NodeFile, NodeHead, file_name
from .tokens import ID_BYTES
from .tree import Node

_DIGITS = "0123456789abcdef"


class Entry(NamedTuple):
    """
    A node as a list shows it.

    Attributes:
        id: of the node.
        parent: of the node before it, or `None`.
        start: number of tokens before it.
        num_tokens: of its run.
        num_bytes: size of its file.
        description: as it was added.
        last_use: seconds since the epoch.
    """

    id: bytes
    parent: bytes | None
    start: int
    num_tokens: int
    num_bytes: int
    description: bytes
    last_use: float


class NodeFolder:
    """
    The folder of the nodes' files.

    Args:
        path: of the folder.
        lock_seconds: how long to wait for the lock of a file.
        require_readable: raises `ValueError` if a node of this head is of no use.
    """

    def __init__(self, path: Path, lock_seconds: float, require_readable: Callable[[NodeHead], object]):
        self.path, self._lock_seconds, self._require_readable = path, lock_seconds, require_readable

    def path_of(self, own_id: bytes) -> Path:
        return self.path / file_name(own_id)

    def ids(self) -> Iterator[bytes]:
        """Yield the ids of the files, by their names; other files are no concern of ours."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                stem = entry.name.removesuffix(SUFFIX)
                is_named = entry.name == stem + SUFFIX and len(stem) == 2 * ID_BYTES and not stem.strip(_DIGITS)
                if is_named and not entry.is_dir(follow_symlinks=False):
                    yield bytes.fromhex(stem)

    def read(self, node: Node) -> NodeFile | None:
        """
        Read the file of a node; `None` if there is none.

        Raises:
            UnreadableNodeError: it is whole, and of no use.
            NodeFileError: it is damaged, or the file of another node.
            PrefixStoreFolderError: it cannot be read now.
        """
        with reported(self.path, "cannot be read"):
            found = NodeFile.read(self.path_of(node.id))
        if found is not None and Node.of(found.head) != node:
            raise NodeFileError(found.path, "does not fit the index.")
        if found is not None:
            try:
                self._require_readable(found.head)
            except ValueError as error:
                raise UnreadableNodeError(found.path, f"is of no use to this version: {error}") from error
        return found

    def entry(self, node: Node) -> Entry | None:
        """
        Read what a list shows of a node; `None` if its file is gone, damaged, or of no use.

        Raises:
            PrefixStoreFolderError: it cannot be read now.
        """
        try:
            file = self.read(node)
        except NodeFileError:
            return None
        if file is None:
            return None
        parent = None if node.parent == NO_PARENT else node.parent
        description, last_use = file.head.description, self.last_use(node.id) / 1e9
        return Entry(node.id, parent, node.start, node.num_tokens, node.file_bytes, description, last_use)

    def touch(self, node: NodeFile) -> None:
        """Note that a node is used now."""
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(node.path, ns=(now, now))

    def last_use(self, own_id: bytes) -> int:
        """Return when a node was last used, in nanoseconds; 0 if it is gone."""
        try:
            return os.stat(self.path_of(own_id), follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return 0

    def is_in_use(self, own_id: bytes) -> bool:
        """Whether a reader has the file of a node open; false where there are no locks to tell."""
        try:
            with open_file(self.path_of(own_id), "rb+") as file:
                return try_lock(file, True) is Lock.REFUSED
        except PermissionError:  # Windows refuses what another has open
            return True
        except OSError as error:
            if isinstance(error, FileNotFoundError) or is_damage(error):
                return False
            raise

    def pin(self, node: NodeFile) -> BinaryIO | None:
        """
        Open a node so that it is in use until the file is closed; `None` if it is gone or another one.

        Raises:
            PrefixStoreFolderError: another process holds its lock for too long, or it cannot be read.
        """
        with reported(self.path, "cannot be read"), contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open_file(node.path))
            except OSError as error:
                if isinstance(error, FileNotFoundError) or is_damage(error):
                    return None
                raise
            if not wait_for_lock(file, False, self._lock_seconds):
                raise PrefixStoreFolderError(self.path, f"has a locked file, {node.path.name}. Is a process stopped?")
            try:
                node.require_same(file)
            except NodeFileError:
                return None
            if not os.fstat(file.fileno()).st_nlink:
                return None
            stack.pop_all()
            return file

    def unlink(self, own_id: bytes, by_force: bool) -> bool:
        """
        Remove the file of a node, if there is one. For the holder of the store's lock.

        Args:
            own_id: of the node.
            by_force: also one in use, where the system can; its reader keeps it until it closes it.

        Returns:
            false if it stays, because it is in use.

        Raises:
            OSError: it cannot be removed.
        """
        path = self.path_of(own_id)
        try:
            with contextlib.ExitStack() as stack:
                lock = try_lock(stack.enter_context(open_file(path, "rb+")), True)
                if lock is Lock.REFUSED and not by_force:
                    return False
                if lock is Lock.NONE_HERE:
                    stack.close()  # Windows removes no open file
                # Who waits for the lock meanwhile finds a file without a name.
                path.unlink()
        except FileNotFoundError:
            pass
        except PermissionError:  # Windows refuses what another has open
            return False
        except OSError as error:
            if not is_damage(error):
                raise
            with contextlib.suppress(IsADirectoryError, FileNotFoundError):
                path.unlink()
        return True
