"""
The file of a node: what it is, the token ids of its run, a description, and the payload.

| bytes | what |
|---|---|
| 152 | the fields of `_FIXED`: magic, version, CRC-32 of the payload, id, parent, two digests, sizes |
| 32 | BLAKE2b of the fields and of all that follows up to the payload |
| 4 a token | token ids |
| | description, and zeros up to a multiple of 4,096 |
| | the payload, which can be mapped |
"""

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import BinaryIO, Self

from .errors import NodeFileError
from .files import is_damage, open_file, read_all, write_all
from .payload import PIECE_BYTES, PayloadWriter
from .tokens import DIGEST_BYTES, ID_BYTES, MOST_TOKENS, TOKEN_BYTES

ALIGNMENT = 4096
VERSION = 1
# The parent of a node that begins with the first token.
NO_PARENT = bytes(ID_BYTES)
LONGEST_DESCRIPTION = 2**20
SUFFIX = ".node"

_MAGIC = b"hf-hybrid prefix"
_FIXED = Struct(f"<16sII{ID_BYTES}s{ID_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}sQQQQ")


@dataclass(frozen=True)
class NodeHead:
    """
    All of a node but the payload.

    Attributes:
        id: of the node, which is the name of its file.
        parent: the node that has the tokens before it, up to `start`; `NO_PARENT` if there are none.
        prefix_digest: of the identity and the tokens before it.
        end_digest: of the identity and the whole blocks up to its end.
        start: number of tokens before it, in whole blocks.
        tokens: of its run, as bytes.
        description: of the caller.
        payload_bytes: size of the payload.
        payload_checksum: CRC-32 of the payload.
    """

    id: bytes
    parent: bytes
    prefix_digest: bytes
    end_digest: bytes
    start: int
    tokens: bytes
    description: bytes
    payload_bytes: int
    payload_checksum: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def token_at(self, index: int) -> int:
        """Return a token of the run."""
        return int.from_bytes(self.tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES], "big")

    @property
    def payload_start(self) -> int:
        return _payload_start(len(self.tokens), len(self.description))

    @property
    def file_bytes(self) -> int:
        return self.payload_start + self.payload_bytes

    def to_bytes(self) -> bytes:
        """Return all that is before the payload."""
        fixed = _FIXED.pack(
            _MAGIC,
            VERSION,
            self.payload_checksum,
            self.id,
            self.parent,
            self.prefix_digest,
            self.end_digest,
            self.start,
            self.num_tokens,
            len(self.description),
            self.payload_bytes,
        )
        rest = self.tokens + self.description
        rest += bytes(self.payload_start - len(fixed) - DIGEST_BYTES - len(rest))
        return fixed + _digest(fixed, rest) + rest

    @classmethod
    def read(cls, path: Path, file: BinaryIO) -> Self:
        """
        Read and check all that is before the payload, and the size of the file.

        Raises:
            NodeFileError: it is no file of a node, is not whole, or was altered.
            OSError: it cannot be read.
        """
        length = os.fstat(file.fileno()).st_size
        start = read_all(file, _FIXED.size + DIGEST_BYTES)
        if len(start) < _FIXED.size + DIGEST_BYTES:
            raise NodeFileError(path, f"is cut off: it has {length:,} bytes.")
        fixed, digest = start[: _FIXED.size], start[_FIXED.size :]
        magic, version, checksum, own_id, parent, prefix, blocks, *numbers = _FIXED.unpack(fixed)
        first, tokens, description, payload = numbers
        if magic != _MAGIC or version != VERSION:
            raise NodeFileError(path, f"does not begin as a node of version {VERSION}.")
        if tokens > MOST_TOKENS or description > LONGEST_DESCRIPTION:
            raise NodeFileError(path, f"has {tokens:,} tokens and {description:,} bytes of description: too many.")
        # Before memory is asked for; Python's integers do not overflow.
        payload_start = _payload_start(tokens * TOKEN_BYTES, description)
        if payload_start + payload != length:
            raise NodeFileError(path, f"has {length:,} bytes and needs {payload_start + payload:,}.")
        rest = read_all(file, payload_start - len(start))
        if _digest(fixed, rest) != digest:
            raise NodeFileError(path, "was altered: its head does not fit its digest.")
        end = tokens * TOKEN_BYTES
        return cls(own_id, parent, prefix, blocks, first, rest[:end], rest[end : end + description], payload, checksum)


@dataclass(frozen=True)
class NodeFile:
    """A node on the disk, whose head was read and found right."""

    path: Path
    head: NodeHead

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """
        Read the head of a node's file; `None` if there is no file.

        Raises:
            NodeFileError: the file is not that of this node.
            OSError: it cannot be read now.
        """
        try:
            with open_file(path) as file:
                return cls(path, _read_head(path, file))
        except FileNotFoundError:
            return None
        except OSError as error:
            if is_damage(error):
                raise _unreadable(path, error) from error
            raise

    def open(self) -> BinaryIO:
        """
        Open the file at the first byte of the payload, which ends with the file.

        It can be mapped from `head.payload_start` on. A mapping stays right on POSIX if the node is removed meanwhile.

        Raises:
            NodeFileError: the file is gone, or another one.
        """
        with _unreadable_told(self.path):
            file = open_file(self.path)
        try:
            self.require_same(file)
        except BaseException:
            file.close()
            raise
        return file

    def require_same(self, file: BinaryIO) -> None:
        """
        Check that an open file is still this node, and go to its payload.

        Raises:
            NodeFileError: it is not.
        """
        with _unreadable_told(self.path):
            file.seek(0)
            if _read_head(self.path, file) != self.head:
                raise NodeFileError(self.path, "was replaced meanwhile.")

    def verify(self) -> None:
        """
        Read the payload and compare it with its checksum.

        Raises:
            NodeFileError: it was altered, or cannot be read.
        """
        checksum = 0
        with _unreadable_told(self.path), self.open() as file:
            while piece := file.read(PIECE_BYTES):
                checksum = zlib.crc32(piece, checksum)
        if checksum != self.head.payload_checksum:
            raise NodeFileError(self.path, "was altered: its payload does not fit its checksum.")


def write_node(file: BinaryIO, head: NodeHead, write: Callable[[PayloadWriter], object]) -> None:
    """
    Write a node into an empty file: first the payload, by `write`, then the head with the checksum.

    Raises:
        NodeFileError: the payload is not as long as the head says.
        OSError: it cannot be written, or `write` raised this.
    """
    file.seek(head.payload_start)
    payload = PayloadWriter(file, head.payload_bytes)
    write(payload)
    payload.require_whole()
    file.seek(0)
    write_all(file, replace(head, payload_checksum=payload.checksum).to_bytes())


def file_name(own_id: bytes) -> str:
    """Return the name of the file of a node."""
    return own_id.hex() + SUFFIX


def _unreadable(path: Path, error: OSError) -> NodeFileError:
    return NodeFileError(path, f"cannot be read: {error.strerror or error}.")


@contextmanager
def _unreadable_told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_head(path: Path, file: BinaryIO) -> NodeHead:
    head = NodeHead.read(path, file)
    if path.name != file_name(head.id):
        raise NodeFileError(path, f"is the file of another node, {head.id.hex()}.")
    return head


def _payload_start(token_bytes: int, description_bytes: int) -> int:
    head = _FIXED.size + DIGEST_BYTES + token_bytes + description_bytes
    return head + -head % ALIGNMENT


def _digest(fixed: bytes, rest: bytes) -> bytes:
    digest = blake2b(fixed, digest_size=DIGEST_BYTES, person=b"node head")
    digest.update(rest)
    return digest.digest()
