"""
The folder of a store: its files, its lock, and what other processes do to it.

| name | what |
|---|---|
| `lock` | says what the folder is; its lock is held while the folder changes |
| `index` | see `index_file.py` |
| `nodes/` | see `node_folder.py` |
| `unfinished/` | see `unfinished.py` |
"""

import contextlib
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..durable_files import sync_folder
from .bounds import Bounds, in_order_of_removal
from .errors import IndexFileError, NodeFileError, NodeNotFoundError, PrefixFolderFullError, PrefixStoreFolderError
from .files import FOLDER_MODE, make_own_folder, open_file, read_all, reported, sync, write_all
from .index_file import IndexFile
from .locks import wait_for_lock
from .node_file import NO_PARENT, NodeFile, NodeHead
from .node_folder import NodeFolder
from .tree import Node, Tree
from .unfinished import Unfinished

_MARK = b"A store of prompts of hf_hybrid_cache, version 1.\n"
_GIB = 2**30


class Folder:
    """
    A folder that threads and processes share.

    Args:
        path: of the folder; it is made if there is none.
        lock_seconds: how long to wait for a lock.
        require_readable: see `PrefixFolder`.

    Raises:
        PrefixStoreFolderError: it cannot be used, holds other files, or is of another version.
    """

    def __init__(
        self, path: Path, lock_seconds: float, require_readable: Callable[[NodeHead], object] = lambda head: None
    ):
        self.path, self._lock_seconds = path, lock_seconds
        self._lock, self._index = path / "lock", IndexFile(path / "index")
        self.nodes = NodeFolder(path / "nodes", lock_seconds, require_readable)
        self.unfinished = Unfinished(path / "unfinished")
        # Held beside the lock of the folder, and while the tree is read.
        self.mutex = threading.RLock()
        self._is_locked = self._is_tidy = False
        with reported(self.path, "cannot be used as a store"):
            self._make()
        with self.locked():
            pass  # which makes index and files agree

    @property
    def tree(self) -> Tree:
        return self._index.tree

    def refresh(self) -> None:
        """
        Read what other processes changed.

        Raises:
            PrefixStoreFolderError: it cannot be read.
        """
        try:
            with reported(self.path, "cannot be read"):
                self._index.read()
        except IndexFileError:
            self._is_tidy = False
            with self.locked():
                pass  # which reads it, or makes it anew

    @contextmanager
    def locked(self) -> Iterator[None]:
        """
        Hold the lock of the folder, with the tree up to date.

        Raises:
            PrefixStoreFolderError: another process holds it for too long, or the folder cannot be read or written.
        """
        with self.mutex:
            if self._is_locked:
                yield
                return
            try:
                with reported(self.path, "cannot be changed"), open_file(self._lock, "rb+") as file:
                    if not wait_for_lock(file, True, self._lock_seconds):
                        raise PrefixStoreFolderError(
                            self.path,
                            f"has been locked by another process for {self._lock_seconds} s. Is one stopped?",
                        )
                    self._is_locked = True
                    self._prepare()
                    yield
            except BaseException:
                self._is_tidy = False
                raise
            finally:
                self._is_locked = False

    def delete(self, ids: Iterable[bytes], by_force: bool = False) -> bool:
        """
        Remove nodes, up to the first one that is in use. For the holder of the lock.

        Args:
            ids: of the nodes, each after those that continue it.
            by_force: also those in use, where the system can; their readers keep them until they close them.

        Returns:
            whether all are gone.
        """
        gone = []
        try:
            for own_id in ids:
                if not self.nodes.unlink(own_id, by_force):
                    return False
                gone.append(own_id)
            return True
        finally:
            if gone:
                sync_folder(self.nodes.path)
                self._index.remove(gone)

    def make_room(self, num_bytes: int, bounds: Bounds) -> None:
        """
        Remove nodes until so many bytes fit. For the holder of the lock.

        Raises:
            PrefixFolderFullError: they do not fit without what may be removed.
        """
        while (excess := self._excess(num_bytes, bounds)) > 0:
            going: list[bytes] = []
            removable = 0
            for node in in_order_of_removal(self.tree, self.nodes.last_use, self.nodes.is_in_use):
                going.append(node.id)
                removable += node.file_bytes
                if removable >= excess:
                    break
            else:
                limit = "" if bounds.max_bytes is None else f" of {bounds.max_bytes / _GIB:.2f}"
                raise PrefixFolderFullError(
                    self.path,
                    f"has no room for {num_bytes / _GIB:.2f} GiB more: it has "
                    f"{self.tree.num_bytes / _GIB:.2f}{limit} GiB, {removable / _GIB:.2f} GiB of that can be removed, "
                    f"and the disk has {shutil.disk_usage(self.path).free / _GIB:.2f} GiB, of which "
                    f"{bounds.min_free_bytes / _GIB:.2f} GiB stay free. Raise max_bytes, free some, or close what is "
                    "in use.",
                )
            self.delete(going)

    def publish(self, path: Path, file: BinaryIO, head: NodeHead) -> None:
        """
        Make a written file a node of the store, unless another one wrote the same node meanwhile, which can be read.

        Raises:
            NodeNotFoundError: the node before it is gone.
            PrefixStoreFolderError: it cannot be written, or locked.
        """
        with reported(self.path, "cannot be written"):
            sync(file)
        with self.locked():
            with contextlib.suppress(NodeFileError):
                if head.id in self.tree.nodes and self.nodes.read(self.tree.nodes[head.id]) is not None:
                    return
            if head.parent != NO_PARENT and head.parent not in self.tree.nodes:
                raise NodeNotFoundError(f"{self.path} has lost the tokens before the prompt that was being kept.")
            file.close()  # Windows renames no open file
            # If the file gets no name, who tidies next removes the record.
            self._index.add(Node.of(head))
            os.replace(path, self.nodes.path_of(head.id))
            sync_folder(self.nodes.path)

    def tidy(self) -> None:
        """
        Make index and files agree, and remove what processes that have ended left. For the holder of the lock.

        Warns:
            UserWarning: nodes are lost, and were removed.
        """
        self.unfinished.reserved()
        names, known = set(self.nodes.ids()), self.tree.nodes.keys()
        if names - known:
            self._make_index()
        missing = self.tree.nodes.keys() - names
        lost = {each for own_id in missing for each in self.tree.with_descendants(own_id)}
        self.delete(sorted(lost, key=lambda own_id: -self.tree.nodes[own_id].start), by_force=True)
        if lost & names:
            warnings.warn(
                f"{self.path} lacks files. {len(lost & names)} that continue them were removed.", stacklevel=2
            )

    def _make(self) -> None:
        self.path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        names = os.listdir(self.path)
        if names and self._lock.name not in names:
            raise PrefixStoreFolderError(
                self.path, f"is no store and has other files ({names[0]}): give a folder of its own."
            )
        with open_file(self._lock, "ab+") as file:
            if not wait_for_lock(file, True, self._lock_seconds):
                raise PrefixStoreFolderError(
                    self.path, f"has been locked for {self._lock_seconds} s. Is a process stopped?"
                )
            file.seek(0)
            mark = read_all(file, 2 * len(_MARK))
            if mark != _MARK:
                # The mark is written before all else, by a process that may have ended half-way.
                if not _MARK.startswith(mark) or os.listdir(self.path) != [self._lock.name]:
                    raise PrefixStoreFolderError(
                        self.path, "is no store, or one of another version: give another folder."
                    )
                self.path.chmod(FOLDER_MODE)
                write_all(file, _MARK[len(mark) :])
                sync(file)
            for folder in (self.nodes.path, self.unfinished.path):
                if not make_own_folder(folder):
                    raise PrefixStoreFolderError(
                        self.path,
                        f"has {folder.name}, which is a link, a file, or of another user: give another folder, or "
                        "remove it.",
                    )

    def _prepare(self) -> None:
        try:
            self._index.read()
        except IndexFileError:
            self._make_index()
        if not self._is_tidy:
            self.tidy()
            self._is_tidy = True
        if self._index.is_long:
            with contextlib.suppress(OSError):
                self._index.replace(self.tree.nodes.values(), self.unfinished.new_path())

    def _make_index(self) -> None:
        """Make the index from the files of the nodes, without those that are damaged or cannot be reached."""
        found: dict[bytes, Node] = {}
        reasons: dict[bytes, str] = {}
        for own_id in self.nodes.ids():
            try:
                file = NodeFile.read(self.nodes.path_of(own_id))
            except NodeFileError as error:
                reasons[own_id] = str(error)
            else:
                if file is not None:
                    found[own_id] = Node.of(file.head)
        tree = Tree()
        for node in sorted(found.values(), key=lambda each: each.start):
            tree.add(node)
            if (node.parent != NO_PARENT and node.parent not in tree.nodes) or not tree.is_in_order(node.id):
                tree.remove(node.id)
                reasons[node.id] = f"{self.nodes.path_of(node.id)} continues a prompt that is gone."
        for own_id in reasons:
            with contextlib.suppress(OSError):
                self.nodes.path_of(own_id).unlink()
        self._index.replace(tree.nodes.values(), self.unfinished.new_path())
        for reason in reasons.values():
            warnings.warn(f"{reason} It was removed from the store.", stacklevel=2)

    def _excess(self, num_bytes: int, bounds: Bounds) -> int:
        reserved, unwritten = self.unfinished.reserved()
        free = shutil.disk_usage(self.path).free - unwritten
        return bounds.excess(num_bytes, self.tree.num_bytes + reserved, free)
