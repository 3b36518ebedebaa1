"""
The files of the nodes: of each its keys, its states, and in the metadata who it is.

Who uses a file shares its lock, and its time is that of the last use.
"""

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..files.tensor_file import CacheFileError, NewFile, Section, TensorFile, TensorForm
from .database import NAME, Node
from .errors import PrefixStoreFolderError
from .keys import KEY_BYTES, MOST_TOKENS, end_digests
from .private_files import Lock, open_file, try_lock, wait_for_lock

_SUFFIX = ".safetensors"
_FORMAT, _VERSION = "hf_hybrid_cache.prefix_store", "4"
_KEYS = "keys"
_ALIGNMENT = 64
# Of a file; another error, such as of too many open files, is of the process.
_ERRORS_OF_FILES = {errno.ENOENT, errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO, errno.EOPNOTSUPP, errno.EIO}


class Head(NamedTuple):
    """
    The head of a file, which says what its node is, see `Node`.

    Attributes:
        parent: name of the node before it.
        description: for lists.
        states: the description of its tensors.
    """

    parent: str | None
    prefix: str
    digest: str
    start: int
    keys: bytes
    description: str
    states: str = ""


def new_file(head: Head, sections: Sequence[Section]) -> NewFile:
    """Return the file of a node, whose states are in sections, to be written."""
    node = {"parent": head.parent, "prefix": head.prefix, "start": head.start}
    metadata = {"format": _FORMAT, "format_version": _VERSION, "node": json.dumps(node)}
    metadata |= {"description": head.description, "states": head.states}
    form = TensorForm("uint8", (len(head.keys) // KEY_BYTES, KEY_BYTES))
    return NewFile(metadata, [Section(_KEYS, {_KEYS: form}, lambda: [[head.keys]]), *sections], _ALIGNMENT)


def opened(path: Path, node: Node | None = None) -> tuple[TensorFile, Head]:
    """Open a file, and read its head; raise `CacheFileError` if it is not whole, or the database has it otherwise."""
    try:
        file: BinaryIO = open_file(path)
    except OSError as error:
        raise CacheFileError(path, f"cannot be read: {error.strerror or error}.") from error
    tensors = TensorFile(path, file)
    try:
        head, num_bytes = _head_of(tensors), os.fstat(file.fileno()).st_size
        in_file = head.prefix, head.start, head.keys, num_bytes
        if node is not None and in_file != (node.prefix, node.start, node.keys, node.file_bytes):
            raise CacheFileError(path, "does not fit the database.")
        return tensors, head
    except BaseException:
        file.close()
        raise


class NodeFolder:
    """The folder of whole files, and that of unfinished ones, each locked by its writer. Others stay."""

    def __init__(self, path: Path, unfinished: Path, lock_seconds: float):
        self.path, self.unfinished, self._lock_seconds = path, unfinished, lock_seconds

    def path_of(self, name: str) -> Path:
        """Return the path of the file of a node."""
        return self.path / f"{name}{_SUFFIX}"

    def names(self) -> Iterator[str]:
        """Yield the names of the nodes that have a file."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                name = entry.name.removesuffix(_SUFFIX)
                if entry.name == name + _SUFFIX and NAME.fullmatch(name) and not entry.is_dir(follow_symlinks=False):
                    yield name

    def has_its_size(self, node: Node) -> bool:
        """Return whether the file of a node is there, and as long as it should be."""
        with contextlib.suppress(OSError):
            status = os.lstat(self.path_of(node.name))
            return stat.S_ISREG(status.st_mode) and status.st_size == node.file_bytes
        return False

    def last_use(self, node: Node) -> int | None:
        """Return when a node was last used, in nanoseconds since the epoch; `None` if it is gone."""
        with contextlib.suppress(OSError):
            return os.lstat(self.path_of(node.name)).st_mtime_ns
        return None

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


def require_damage(path: Path, error: CacheFileError) -> None:
    """Raise `PrefixStoreFolderError` if an error of reading a file does not tell of the file, which may be right."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno not in _ERRORS_OF_FILES:
        raise PrefixStoreFolderError(path, error.reason) from error


def _head_of(file: TensorFile) -> Head:
    metadata = file.metadata
    if (metadata.get("format"), metadata.get("format_version")) != (_FORMAT, _VERSION):
        raise CacheFileError(file.path, f"is no node of version {_VERSION}.")
    keys = file.tensors(_KEYS).get(_KEYS)
    num_tokens = 0 if keys is None else keys.form.num_bytes // KEY_BYTES
    if keys is None or keys.form != TensorForm("uint8", (num_tokens, KEY_BYTES)) or not 0 < num_tokens <= MOST_TOKENS:
        raise CacheFileError(file.path, "has no keys.")
    rows = bytearray(num_tokens * KEY_BYTES)
    file.read(_KEYS, {_KEYS: memoryview(rows)})
    data = bytes(rows)
    try:
        tree = json.loads(metadata["node"])
        parent, prefix, start = tree["parent"], tree["prefix"], tree["start"]
        is_right = NAME.fullmatch(prefix) and type(start) is int and start >= 0
        if not is_right or (parent is None) != (start == 0) or not isinstance(parent, str | None):
            raise ValueError(f"it is no place of a node: {tree}")
        ends = {end: digest for digest, end in end_digests(prefix, data).items()}
        if num_tokens not in ends:
            raise ValueError("no node can end with its keys")
        return Head(parent, prefix, ends[num_tokens], start, data, metadata["description"], metadata["states"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CacheFileError(file.path, f"does not say which node it is ({type(error).__name__}: {error}).") from error
