"""
The nodes: runs of tokens, each with its states in a file, `END-START.safetensors`.

The name is all that there is to know of where a node belongs: the digests of all keys up to where it ends, and up to
where it begins. So names alone tell the way of a prompt. A file that says another name, or has other keys, is damaged.
Who uses a file shares its lock, and its time is that of the last use.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ..files.tensor_file import CacheFileError, NewFile, Section, TensorFile
from .errors import PrefixStoreFolderError
from .keys import as_bytes, as_keys, end_digests
from .private_files import Lock, open_file, try_lock, wait_for_lock

# Of the folder and its files: raise it when they mean something else.
VERSION = 6
_FORMAT = "hf_hybrid_cache.prefix_store"
_SUFFIX, _UNFINISHED = ".safetensors", ".unfinished"
_NAME = re.compile(rf"([0-9a-f]{{32}})-([0-9a-f]{{32}}){_SUFFIX}")
_UNFINISHED_NAME = re.compile(rf"[0-9a-f]{{32}}{_UNFINISHED}")
_ALIGNMENT = 64
# Of a file; another error, such as of too many open files, is of the process.
_ERRORS_OF_FILES = {errno.ENOENT, errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO, errno.EOPNOTSUPP, errno.EIO}


class Head(NamedTuple):
    """
    The facts that a file tells beside its states.

    Attributes:
        identity: digest of what is before the first token; that of the start if the node begins with it.
        keys: of its run, `[tokens]`.
        description: for lists.
        states: the description of its tensors.
    """

    identity: str
    keys: np.ndarray
    description: str
    states: str


class Node(NamedTuple):
    """
    A node, by the name of its file.

    Attributes:
        folder: of the file.
        end: digest of the identity and all keys up to its end, see `end_digests`.
        start: digest of those before it.
    """

    folder: Path
    end: str
    start: str

    @property
    def name(self) -> str:
        return f"{self.end}-{self.start}"

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}{_SUFFIX}"

    def new_file(self, head: Head, sections: Sequence[Section]) -> NewFile:
        """Return the file, whose states are in sections, to be written."""
        metadata = {"format": _FORMAT, "format_version": str(VERSION), "node": self.name} | head._asdict()
        return NewFile(metadata | {"keys": b64encode(as_bytes(head.keys)).decode()}, sections, _ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        """Size of the file; 0 if it is gone."""
        with contextlib.suppress(OSError):
            return os.lstat(self.path).st_size
        return 0

    @property
    def last_use(self) -> int:
        """When it was last used, in nanoseconds since the epoch; 0 if it is gone."""
        with contextlib.suppress(OSError):
            return os.lstat(self.path).st_mtime_ns
        return 0

    @property
    def is_in_use(self) -> bool:
        """Whether a reader has the file open; false where there are no locks to tell."""
        try:
            with open_file(self.path, "rb+") as file:
                return try_lock(file, True) is Lock.REFUSED
        except PermissionError:  # Windows refuses what another has open
            return True
        except OSError:  # what is no file is not in use
            return False

    def open(self) -> tuple[TensorFile, Head]:
        """Open the file, and read its head; raise `CacheFileError` if it is not whole, or not that of this node."""
        try:
            file = open_file(self.path)
        except OSError as error:
            raise CacheFileError(self.path, f"cannot be read: {error.strerror or error}.") from error
        with contextlib.ExitStack() as stack:
            tensors = stack.enter_context(TensorFile(self.path, file))
            try:
                head = self._head(tensors.metadata)
            except (ValueError, KeyError) as error:
                reason = f"is not the node of its name ({type(error).__name__}: {error})."
                raise CacheFileError(self.path, reason) from error
            stack.pop_all()
            return tensors, head

    def _head(self, metadata: Mapping[str, str]) -> Head:
        if (metadata["format"], metadata["format_version"]) != (_FORMAT, str(VERSION)):
            raise ValueError(f"it is none of version {VERSION}")
        keys = as_keys(b64decode(metadata["keys"], validate=True))
        # Another model's node of the same tokens would have these keys, too.
        if metadata["node"] != self.name or end_digests(self.start, keys).get(self.end) != len(keys):
            raise ValueError("it is another one")
        return Head(metadata["identity"], keys, metadata["description"], metadata["states"])

    def head(self) -> Head | None:
        """Read the head; `None` if the file is damaged or gone."""
        try:
            file, head = self.open()
        except CacheFileError as error:
            require_damage(self.path, error)
            return None
        with file:
            return head

    def note_use(self) -> None:
        """Note that it is used now."""
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.path, ns=(now, now))

    def pin(self, lock_seconds: float) -> BinaryIO | None:
        """Open the file, which is in use until that is closed; `None` if it is gone."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open_file(self.path))
            except FileNotFoundError:
                return None
            if not wait_for_lock(file, False, lock_seconds):
                raise PrefixStoreFolderError(self.folder, f"has a locked file, {file.name}. Is a process stopped?")
            if not os.fstat(file.fileno()).st_nlink:
                return None
            stack.pop_all()
            return file

    def unlink(self, by_force: bool) -> bool:
        """Remove the file, by force one in use, too, which its reader keeps; return whether it is gone."""
        try:
            with contextlib.ExitStack() as stack:
                if stat.S_ISREG(os.lstat(self.path).st_mode):
                    lock = try_lock(stack.enter_context(open_file(self.path, "rb+")), True)
                    if lock is Lock.REFUSED and not by_force:
                        return False
                    if lock is Lock.NONE_HERE:
                        stack.close()  # Windows removes no open file
                # Who waits for the lock meanwhile finds a file without a name.
                self.path.unlink()
        except FileNotFoundError:
            pass
        except PermissionError:  # Windows refuses what another has open
            return False
        return True


class Nodes:
    """
    The nodes that a folder has at one time. Other files than theirs are none.

    Attributes:
        unfinished: files that were being written then.
    """

    def __init__(self, folder: Path):
        self.unfinished: list[Path] = []
        self._heads: dict[Node, Head | None] = {}  # of nodes that prompts share, read once for all of them
        self._by_end: dict[str, list[Node]] = {}
        self._by_start: dict[str, list[Node]] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                if (name := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    node = Node(folder, *name.groups())
                    self._by_end.setdefault(node.end, []).append(node)
                    self._by_start.setdefault(node.start, []).append(node)
                elif _UNFINISHED_NAME.fullmatch(entry.name):
                    self.unfinished.append(folder / entry.name)

    def __iter__(self) -> Iterator[Node]:
        for nodes in self._by_end.values():
            yield from nodes

    def that_end(self, digest: str) -> Sequence[Node]:
        """Return the nodes that end there."""
        return self._by_end.get(digest, ())

    def that_start(self, digest: str) -> Sequence[Node]:
        """Return the nodes that begin there."""
        return self._by_start.get(digest, ())

    def named(self, name: str) -> Node | None:
        """Return the node of a name."""
        return next((node for node in self.that_end(name.partition("-")[0]) if node.name == name), None)

    def longest(self, root: str, ends: Mapping[str, int]) -> tuple[Node, ...]:
        """Return the fewest nodes, from the first token on, that go as far as any to one of a prompt's ends."""
        ways: dict[str, tuple[Node, ...]] = {root: ()}
        for digest in ends:
            to_here = [(*ways[node.start], node) for node in self.that_end(digest) if node.start in ways]
            if to_here:
                ways[digest] = min(to_here, key=len)
        return [*ways.values()][-1]

    def way_to(self, node: Node | None) -> list[tuple[Node, Head]]:
        """Return the nodes from the first token to one, with their heads; none if one is gone or damaged."""
        way: list[tuple[Node, Head]] = []
        while node is not None and (head := self._head_of(node)) is not None:
            way.append((node, head))
            if node.start == head.identity:
                return way[::-1]
            node = next(iter(self.that_end(node.start)), None)
        return []

    def _head_of(self, node: Node) -> Head | None:
        if node not in self._heads:
            self._heads[node] = node.head()
        return self._heads[node]

    def with_descendants(self, node: Node) -> list[Node]:
        """Return a node and all that have no way without it, each after those that continue it."""
        going = {node: None}
        for each in (queue := [node]):
            if going.keys() >= {*self.that_end(each.end)}:
                queue += (new := [child for child in self.that_start(each.end) if child not in going])
                going |= dict.fromkeys(new)
        return queue[::-1]

    def reserved(self) -> tuple[int, int]:
        """
        Return the bytes of unfinished files, and how many of them are not on the disk yet; remove what nobody writes.

        Where there are no locks nobody can tell, and all stay.
        """
        num_bytes = unwritten = 0
        for path in self.unfinished:
            with contextlib.suppress(OSError), open_file(path, "rb+") as file:
                if try_lock(file, True) is Lock.HELD:
                    path.unlink()
                    continue
                status = os.fstat(file.fileno())
                num_bytes += status.st_size
                unwritten += max(0, status.st_size - 512 * getattr(status, "st_blocks", 0))
        return num_bytes, unwritten


def begin(folder: Path, num_bytes: int) -> tuple[Path, BinaryIO]:
    """Make an unfinished file of this size, which counts from now on, and is locked while it is open."""
    path = folder / f"{secrets.token_hex(16)}{_UNFINISHED}"
    file = open_file(path, "xb+")
    try:
        try_lock(file, True)  # nobody else has seen it
        file.truncate(num_bytes)
    except BaseException:
        file.close()
        path.unlink()
        raise
    return path, file


def require_damage(path: Path, error: CacheFileError) -> None:
    """Raise `PrefixStoreFolderError` if an error of reading a file does not tell of the file, which may be right."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno not in _ERRORS_OF_FILES:
        raise PrefixStoreFolderError(path, error.reason) from error
