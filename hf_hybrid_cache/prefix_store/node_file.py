"""The file of a node: its keys, its states, and in the metadata who it is."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..files.tensor_file import CacheFileError, NewFile, Section, TensorFile, TensorForm
from .database import Node
from .errors import PrefixStoreFolderError
from .keys import BLOCK_TOKENS, DIGEST_BYTES, KEY_BYTES, MOST_TOKENS
from .private_files import open_file

SUFFIX = ".safetensors"
_FORMAT, _VERSION = "hf_hybrid_cache.prefix_store", "2"
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
    prefix: bytes
    start: int
    keys: bytes
    description: str
    states: str = ""


def new_file(head: Head, sections: Sequence[Section]) -> NewFile:
    """Return the file of a node, whose states are in sections, to be written."""
    node = {"parent": head.parent, "prefix": head.prefix.hex(), "start": head.start}
    metadata = {"format": _FORMAT, "format_version": _VERSION, "node": json.dumps(node)}
    metadata |= {"description": head.description, "states": head.states}
    form = TensorForm("uint8", (len(head.keys) // KEY_BYTES, KEY_BYTES))
    return NewFile(metadata, [Section(_KEYS, {_KEYS: form}, lambda: [[head.keys]]), *sections], _ALIGNMENT)


def opened(path: Path) -> tuple[TensorFile, Head]:
    """Open the file of a node, and read its head; raise `CacheFileError` if it is none, not whole, or altered."""
    try:
        file: BinaryIO = open_file(path)
    except OSError as error:
        raise CacheFileError(path, f"cannot be read: {error.strerror or error}.") from error
    tensors = TensorFile(path, file)
    try:
        return tensors, _head_of(tensors)
    except BaseException:
        file.close()
        raise


def opened_node(path: Path, node: Node) -> tuple[TensorFile, Head]:
    """Open the file of a node; raise `CacheFileError` also if the database has it otherwise."""
    file, head = opened(path)
    is_same = (head.prefix, head.start, head.keys) == (node.prefix, node.start, node.keys)
    if not is_same or os.fstat(file.fileno()).st_size != node.file_bytes:
        file.__exit__()
        raise CacheFileError(path, "does not fit the database.")
    return file, head


def damage(path: Path, node: Node, require_readable: Callable[[Head], object]) -> str | None:
    """Read all of the file of a node, and return what is wrong with it; `require_readable` is that of `Folder`."""
    try:
        file, head = opened_node(path, node)
        with file:
            for section in file.sections:
                file.read(section, {})
        require_readable(head)
    except CacheFileError as error:
        require_damage(path, error)
        return str(error)
    except ValueError as error:
        return f"{path} is of no use to this version: {error}."
    return None


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
    data = bytearray(num_tokens * KEY_BYTES)
    file.read(_KEYS, {_KEYS: memoryview(data)})
    try:
        tree = json.loads(metadata["node"])
        parent, prefix, start = tree["parent"], bytes.fromhex(tree["prefix"]), tree["start"]
        is_right = len(prefix) == DIGEST_BYTES and type(start) is int and start >= 0 and not start % BLOCK_TOKENS
        if not is_right or (parent is None) != (start == 0) or not isinstance(parent, str | None):
            raise ValueError(f"it is no place of a node: {tree}")
        return Head(parent, prefix, start, bytes(data), metadata["description"], metadata["states"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CacheFileError(file.path, f"does not say which node it is ({type(error).__name__}: {error}).") from error
