"""
The folder of a store, in which prompts, each with states, survive the process.

| name | what |
|---|---|
| `prompts.sqlite` | which nodes there are, see `database.py` |
| `nodes/`, `unfinished/` | the files of the nodes, and those that are being written, see `node_files.py` |

A file is written and synced before it gets its name, and then its row, in one transaction. So a process that is killed
leaves a row without a file, or a file without a row, and who comes next makes them agree.
"""

import contextlib
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TypeVar

import numpy as np

from ..files.tensor_file import CacheFileError, Section, TensorFile
from ..system.durable_files import sync_folder
from .database import DamagedDatabaseError, Node, Nodes, transaction
from .errors import NodeInUseError, NodeNotFoundError, PrefixStoreFolderError, PrefixStoreFullError
from .keys import KEY_BYTES, as_bytes, as_keys, end_digests, identity_digest, num_common
from .node_files import Head, NodeFolder, new_file, opened, require_damage
from .private_files import has_locks, is_own, locked_folder, open_file, reported

_DATABASE, _NODES, _UNFINISHED = "prompts.sqlite", "nodes", "unfinished"
_OURS = {_DATABASE, f"{_DATABASE}-journal", _NODES, _UNFINISHED}
_OLD_FILES = {"lock", "index"}
_GIB = 2**30
_T = TypeVar("_T")


class Part(NamedTuple):
    """A part of a prompt: a node, and the path of its file."""

    path: Path
    node: Node

    def open(self) -> TensorFile:
        """Open the file; raise `CacheFileError` if it is gone, another one, or damaged."""
        return opened(self.path, self.node)[0]


class Match:
    """
    The stored beginning of a prompt: parts in order, without holes. It is in use until it is closed.

    While it is in use the store does not remove its nodes: the last file's lock is shared, which protects those before
    it, which it continues. Where there are no locks it may; opening them then fails with `CacheFileError`. A process
    that is forked meanwhile uses them, too, until it ends.
    """

    def __init__(self, parts: Sequence[Part] = (), pin: BinaryIO | None = None):
        self.parts, self._pin = tuple(parts), pin
        self.num_tokens = self.parts[-1].node.end if self.parts else 0

    def close(self) -> None:
        if self._pin is not None:
            self._pin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Entry(NamedTuple):
    """A node as lists show it, with its description, and the seconds since the epoch when it was last used."""

    node: Node
    description: str
    last_use: float


class Folder:
    """
    A folder of prompts, found again by all keys up to where one of their nodes ends.

    Several threads and processes may use one folder: the database lets one of them change it at a time, and others
    search meanwhile. A node in use is not removed. Where there are no locks (Windows, some network file systems) one
    process at a time may write; others may read, and what they find is right.

    A checksum tells of files that were altered, not of those that somebody forged: the folder is its owner's alone.

    Args:
        path: of the folder; it is made if there is none, and must be empty if it is no store yet.
        max_bytes: the most that files of nodes may have together; `None` for no limit but the disk's. The database is
            beside it.
        min_free_bytes: what stays free on the disk.
        lock_seconds: how long to wait for a process that holds a lock.
        require_readable: raises `ValueError` if a node of this head is of no use, such as one that another version
            wrote.

    Raises:
        PrefixStoreFolderError: the folder cannot be used, has other files, or is of another version.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        min_free_bytes: int = 2**30,
        lock_seconds: float = 30.0,
        require_readable: Callable[[Head], object] = lambda head: None,
    ):
        try:
            self.path = Path(path).expanduser().absolute()  # the working directory may change
        except (RuntimeError, FileNotFoundError) as error:
            raise PrefixStoreFolderError(
                path, "cannot be found: there is no home folder, or the working directory is gone. Give another path."
            ) from error
        self._max_bytes, self._min_free_bytes, self._lock_seconds = max_bytes, min_free_bytes, lock_seconds
        self._require_readable = require_readable
        self._database = self.path / _DATABASE
        self._files = NodeFolder(self.path / _NODES, self.path / _UNFINISHED, lock_seconds)
        with reported(self.path, "cannot be used as a store"):
            self._make()
            self._transaction = partial(transaction, self._database, lock_seconds, has_locks(self.path))
        self._change(self._agree)

    def find(self, identity: bytes, keys: np.ndarray) -> Match:
        """
        Find the longest stored beginning of a prompt, `[tokens]`, whose nodes are in use until the match is closed.

        A file that is gone, or has another size, is not used, and removed with a warning.
        """
        data = as_bytes(keys)
        return self._find(end_digests(identity_digest(identity), data), data)

    def nearest(self, identity: bytes, keys: np.ndarray, match: Match) -> np.ndarray:
        """Return the keys of a node after a match that has as many of a prompt's next keys, `[tokens]`, as any."""
        prefix = match.parts[-1].node.digest if match.parts else identity_digest(identity)
        following = as_bytes(keys[match.num_tokens :])
        beside = self._read(lambda nodes: [node.keys for node in nodes.beside(prefix, following)])
        return as_keys(max(beside, key=lambda each: num_common(each, following), default=b""))

    def add(
        self,
        identity: bytes,
        keys: np.ndarray,
        start: int,
        sections: Sequence[Section],
        description: str = "",
        states: str = "",
    ) -> str:
        """
        Add what follows the first `start` tokens of a prompt, `[tokens]`, as a node; return that with the last token.

        It is another one if these are stored already. A node must end at `start`, or `NodeNotFoundError` is raised:
        keep its match open meanwhile. The last key tells that a node may end there.

        What does not fit the limits (`PrefixStoreFullError`), or cannot be written (`PrefixStoreFolderError`), leaves
        the store as it was, but for what made room.
        """
        data = as_bytes(keys)
        with self._find(ends := end_digests(identity_digest(identity), data), data) as match:
            if match.num_tokens == len(keys):
                return match.parts[-1].node.name
        # Another process may have added more than is kept here.
        with self._find({digest: end for digest, end in ends.items() if end <= start}, data) as match:
            if match.num_tokens != start:
                raise NodeNotFoundError(
                    f"{self.path} has {match.num_tokens:,} tokens of the prompt; new ones cannot begin after {start:,}."
                )
            parent, prefix = None, identity_digest(identity)
            if match.parts:
                parent, prefix = match.parts[-1].node.name, match.parts[-1].node.digest
            digest, end = list(ends.items())[-1]
            assert end == len(keys) > start
            head = Head(parent, prefix, digest, start, data[start * KEY_BYTES :], description, states)
            return self._write(head, sections)

    def entries(self) -> list[Entry]:
        """List the nodes, the one used last first."""
        nodes, descriptions = self._read(lambda nodes: (list(nodes.all()), nodes.descriptions()))
        times = [(node, self._files.last_use(node)) for node in nodes]
        entries = [Entry(node, descriptions[node.id], time / 1e9) for node, time in times if time is not None]
        return sorted(entries, key=lambda each: (-each.last_use, each.node.name))

    def keys(self, name: str) -> np.ndarray:
        """Return all keys of a prompt up to the end of a node, `[tokens]`; raise `NodeNotFoundError` if it is gone."""
        data = b"".join(node.keys for node in self._read(lambda nodes: nodes.way_to(nodes.named(name))))
        if not data:
            raise NodeNotFoundError(f"{self.path} has no node {name}.")
        return as_keys(data)

    def remove(self, name: str) -> None:
        """Remove a node and all that continue it; `NodeInUseError` if one is in use, `NodeNotFoundError` without it."""

        def remove(nodes: Nodes) -> bool:
            if (node := nodes.named(name)) is None:
                raise NodeNotFoundError(f"{self.path} has no node {name}.")
            going = nodes.with_descendants(node)
            return not any(map(self._files.is_in_use, going)) and self._delete(nodes, going)

        if not self._change(remove):
            raise NodeInUseError(f"{self.path} uses the node {name}, or one that continues it.")

    def remove_unshared(self, name: str, except_tokens: int = 0) -> None:
        """
        Remove the last node of a prompt, and those before it, up to one that another node continues.

        Nodes that end with one of the first `except_tokens` tokens stay. Nothing happens if there is no such node. At
        one in use `NodeInUseError` is raised; it and those before it are there still.
        """

        def remove(nodes: Nodes) -> bool:
            for each in nodes.way_to(nodes.named(name))[::-1]:
                if each.end <= except_tokens or next(nodes.children(each), None) is not None:
                    break
                if not self._delete(nodes, [each]):
                    return False
            return True

        if not self._change(remove):
            raise NodeInUseError(f"{self.path} uses the node {name}, or one before it.")

    def damages(self) -> dict[str, str]:
        """Read everything and compare it with its checksums; return what is wrong, by the names of the nodes."""
        self._read(Nodes.require_integrity)
        self._change(self._agree)
        found = {node.name: self._damage(node) for node in self._read(lambda nodes: list(nodes.all()))}
        # What was removed meanwhile is not damaged.
        return {name: reason for name, reason in found.items() if reason and os.path.lexists(self._files.path_of(name))}

    def remove_damaged(self, name: str) -> bool:
        """
        Verify a node that does not seem right, and remove it and all that continue it if it is not, even in use.

        Then it warns, and returns true.
        """

        def remove(nodes: Nodes) -> str | None:
            nodes.require_integrity()  # a row of it may be wrong, and the file right
            node = nodes.named(name)
            reason = None if node is None else self._damage(node)
            if node is not None and reason:
                self._delete(nodes, nodes.with_descendants(node), by_force=True)
            return reason

        if reason := self._change(remove):
            _warn_removed(reason)
        return reason is not None

    def _find(self, ends: Mapping[str, int], data: bytes) -> Match:
        left_out: set[int] = set()
        while True:
            way = self._read(lambda nodes: nodes.longest(ends, data, left_out))
            if not way:
                return Match()
            damaged = next((node for node in way if not self._files.has_its_size(node)), None)
            if damaged is None:
                with reported(self.path, "cannot be read"):
                    pin = self._files.pin(way[-1])
                if pin is not None:
                    break
                # What is gone by now, the next search does not find.
            elif not self._is_dropped(damaged):
                left_out.add(damaged.id)
        for node in way:
            self._files.note_use(node)
        return Match([Part(self._files.path_of(node.name), node) for node in way], pin)

    def _is_dropped(self, node: Node) -> bool:
        """Remove a node that seems damaged, and return whether that was done."""
        try:
            return self.remove_damaged(node.name)
        except PrefixStoreFolderError as error:
            warnings.warn(f"The damaged node {node.name} stays: {error}", stacklevel=2)
            return False

    def _write(self, head: Head, sections: Sequence[Section]) -> str:
        """Write a node and publish it; return its name."""
        name, file_to_write = secrets.token_hex(16), new_file(head, sections)
        unfinished, final = self._files.unfinished / name, self._files.path_of(name)
        num_bytes = file_to_write.num_bytes
        published = None
        try:
            with self._change(lambda nodes: self._begin(nodes, name, num_bytes)) as file:
                with reported(self.path, "cannot be written"):
                    file_to_write.write(file)
                    os.fsync(file.fileno())
                published = self._change(lambda nodes: self._publish(nodes, name, head, num_bytes, file))
            return published
        finally:
            for path in (unfinished, *([] if published == name else [final])):
                with contextlib.suppress(OSError):  # whoever comes next removes it
                    path.unlink(missing_ok=True)

    def _begin(self, nodes: Nodes, name: str, num_bytes: int) -> BinaryIO:
        """Make room, and an unfinished file of this size."""
        self._make_room(nodes, num_bytes)
        return self._files.begin(name, num_bytes)

    def _publish(self, nodes: Nodes, name: str, head: Head, num_bytes: int, file: BinaryIO) -> str:
        """Make a written file a node, unless another one wrote the same node meanwhile; return its name."""
        node = _node_of(nodes, name, head, num_bytes)
        if node is None:
            raise NodeNotFoundError(f"{self.path} has lost the tokens before the prompt that was being kept.")
        if (same := nodes.same(node)) is not None:
            if self._files.has_its_size(same):
                return same.name
            self._delete(nodes, nodes.with_descendants(same), by_force=True)
        file.close()  # Windows renames no open file
        os.replace(self._files.unfinished / name, self._files.path_of(name))
        sync_folder(self._files.path)
        nodes.add(node, head.description)
        return name

    def _make_room(self, nodes: Nodes, num_bytes: int) -> None:
        """Remove nodes until so many bytes fit; raise `PrefixStoreFullError` if that is not enough."""
        reserved, unwritten = self._files.reserved()
        used, free = nodes.num_bytes() + reserved, shutil.disk_usage(self.path).free - unwritten
        excess = num_bytes + self._min_free_bytes - free
        if self._max_bytes is not None:
            excess = max(excess, used + num_bytes - self._max_bytes)
        if excess <= 0:
            return
        going: list[Node] = []
        removable = 0
        for node in self._in_order_of_removal(nodes):
            going.append(node)
            removable += node.file_bytes
            if removable >= excess and self._delete(nodes, going):
                return
        limit = "" if self._max_bytes is None else f" of {self._max_bytes / _GIB:.2f}"
        raise PrefixStoreFullError(
            self.path,
            f"has no room for {num_bytes / _GIB:.2f} GiB more: it has {used / _GIB:.2f}{limit} GiB, "
            f"{removable / _GIB:.2f} GiB of that can be removed, and the disk has {free / _GIB:.2f} GiB, of which "
            f"{self._min_free_bytes / _GIB:.2f} GiB stay free. Raise max_bytes, free some, or close what is in use.",
        )

    def _in_order_of_removal(self, nodes: Nodes) -> Iterator[Node]:
        """Yield the nodes that may go, the one used longest ago first of those that no other continues any more."""
        by_id = {node.id: node for node in nodes.all()}
        num_children = dict.fromkeys(by_id, 0)
        for node in by_id.values():
            if node.parent in num_children:
                num_children[node.parent] += 1
        waiting = [
            (self._files.last_use(by_id[each]) or 0, each) for each, number in num_children.items() if not number
        ]
        heapify(waiting)
        while waiting:
            node = by_id[heappop(waiting)[1]]
            if self._files.is_in_use(node):  # it stays, and so do those before it
                continue
            yield node
            if node.parent in num_children:
                num_children[node.parent] -= 1
                if not num_children[node.parent]:
                    heappush(waiting, (self._files.last_use(by_id[node.parent]) or 0, node.parent))

    def _delete(self, nodes: Nodes, going: Sequence[Node], by_force: bool = False) -> bool:
        """Remove nodes, each after those that continue it, up to the first one in use; return whether all are gone."""
        gone = []
        try:
            for node in going:
                if not self._files.unlink(node, by_force):
                    return False
                gone.append(node.id)
            return True
        finally:
            if gone:
                sync_folder(self._files.path)
                nodes.remove(gone)

    def _agree(self, nodes: Nodes) -> None:
        """Make database and files agree, and remove what processes that have ended left."""
        self._files.reserved()
        names = set(self._files.names())
        known = {node.name: node for node in nodes.all()}
        going = {each.id: each for name in known.keys() - names for each in nodes.with_descendants(known[name])}
        self._delete(nodes, sorted(going.values(), key=lambda each: -each.start), by_force=True)
        if lost := sum(each.name in names for each in going.values()):
            warnings.warn(f"{self.path} lacks files. {lost} that continue them were removed.", stacklevel=2)
        self._adopt(nodes, names - known.keys())

    def _adopt(self, nodes: Nodes, names: set[str]) -> None:
        """Make nodes of files that the database lacks, and remove those that are damaged or cannot be reached."""
        heads: list[tuple[str, Head]] = []
        for name in names:
            try:
                file, head = opened(self._files.path_of(name))
                with file:
                    heads.append((name, head))
            except CacheFileError as error:
                require_damage(self._files.path_of(name), error)
                self._remove_file(name, str(error))
        for name, head in sorted(heads, key=lambda each: each[1].start):
            path = self._files.path_of(name)
            if (node := _node_of(nodes, name, head, os.stat(path).st_size)) is None:
                self._remove_file(name, f"{path} continues a prompt that is gone.")
            else:
                nodes.add(node, head.description)

    def _remove_file(self, name: str, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._files.path_of(name).unlink()
        _warn_removed(reason)

    def _make(self) -> None:
        self.path.mkdir(0o700, parents=True, exist_ok=True)
        names = set(os.listdir(self.path))
        if _DATABASE not in names:
            if names >= _OLD_FILES:
                raise PrefixStoreFolderError(
                    self.path, "is a store of an earlier version, which this one does not read: give another folder."
                )
            if others := sorted(names - _OURS):
                raise PrefixStoreFolderError(
                    self.path, f"is no store and has other files ({others[0]}): give a folder of its own."
                )
            self.path.chmod(0o700)
            with contextlib.suppress(FileExistsError):
                open_file(self._database, "xb+").close()
        for folder in (self._files.path, self._files.unfinished):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
        for path in (self._database, self._files.path, self._files.unfinished):
            if not is_own(path, is_folder=path != self._database):
                raise PrefixStoreFolderError(
                    self.path,
                    f"has {path.name}, which is a link, something else, or of another user: give another folder, or "
                    "remove it.",
                )

    def _read(self, act: Callable[[Nodes], _T]) -> _T:
        """Do something with the nodes as they are now."""
        return self._done(False, act)

    def _change(self, act: Callable[[Nodes], _T]) -> _T:
        """Do something that changes the nodes, or nothing."""
        return self._done(True, act)

    def _done(self, changes: bool, act: Callable[[Nodes], _T]) -> _T:
        """Act in a transaction, beside others; with a database that is damaged alone, when it has been made again."""
        with reported(self.path, f"cannot be {'changed' if changes else 'read'}"):
            beside_others = locked_folder(self.path, False, self._lock_seconds)
            with contextlib.suppress(DamagedDatabaseError), beside_others, self._transaction(changes) as nodes:
                return act(nodes)
            with locked_folder(self.path, True, self._lock_seconds):
                try:
                    with self._transaction(changes) as nodes:  # another process may have made it again
                        return act(nodes)
                except DamagedDatabaseError as error:
                    reason = str(error)  # the error's frames may hold a cursor, which keeps the database locked
                self._make_database_again(reason)
                with self._transaction(changes) as nodes:
                    return act(nodes)

    def _make_database_again(self, reason: str) -> None:
        """Make the database again from the files. An empty one is new, and what its journal has does not count."""
        warnings.warn(f"{reason} It is made again from the files.", stacklevel=4)
        with contextlib.suppress(FileExistsError):
            open_file(self._database, "xb+").close()
        os.truncate(self._database, 0)
        with self._transaction(True) as nodes:
            self._agree(nodes)

    def _damage(self, node: Node) -> str | None:
        """Read all of the file of a node, and return what is wrong with it."""
        path = self._files.path_of(node.name)
        try:
            file, head = opened(path, node)
            with file:
                for section in file.sections:
                    file.read(section, {})
            self._require_readable(head)
        except CacheFileError as error:
            require_damage(path, error)
            return str(error)
        except ValueError as error:
            return f"{path} is of no use to this version: {error}."
        return None


def _node_of(nodes: Nodes, name: str, head: Head, num_bytes: int) -> Node | None:
    """Return what a file is as a node; `None` if the one before it is gone."""
    parent = None if head.parent is None else nodes.named(head.parent)
    if head.parent is not None and (parent is None or (parent.digest, parent.end) != (head.prefix, head.start)):
        return None
    parent_id = None if parent is None else parent.id
    return Node(0, name, parent_id, head.prefix, head.digest, head.start, head.keys, num_bytes)


def _warn_removed(reason: str) -> None:
    warnings.warn(f"{reason} It was removed from the store.", stacklevel=3)
