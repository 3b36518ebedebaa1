"""
The index on the disk: a log of the nodes that came and went.

It is one small file, so that a process that has just begun need not open the files of all nodes, and one that has read
it reads only what was added since. A record is there before the file of its node, and stays until that file is gone:
so no file is forgotten, and a record without a file is no more than a prompt that is not found. Records and the header
have checksums; an index that does not fit them is made again from the files.
"""

import os
import secrets
import zlib
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from ..durable_files import renamed_when_whole
from .errors import IndexFileError
from .files import is_damage, open_file, private, read_all, sync, write_all
from .tokens import BLOCK_BYTES, BLOCK_TOKENS, DIGEST_BYTES, ID_BYTES, TOKEN_BYTES
from .tree import Node, Tree

VERSION = 1

_MAGIC = b"hf-hybrid index "
# The generation tells a log from the one that it replaced.
_HEADER = Struct("<16sI16s")
_RECORD = Struct(f"<B{ID_BYTES}s{ID_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}sQQQ{BLOCK_BYTES}s")
_CHECKSUM = Struct("<I")
_RECORD_AND_CHECKSUM = Struct(f"{_RECORD.format}I")
_RECORD_BYTES = _RECORD_AND_CHECKSUM.size
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_CAME, _WENT = 1, 2
# Records of nodes that went, beyond as many as there are nodes, after which the log is written anew.
_SPARE_RECORDS = 256
_RECORDS_AT_ONCE = 4096


class IndexFile:
    """
    The index of a folder, and the tree that it describes.

    Args:
        path: of the index.

    Attributes:
        tree: as it was when the index was last read.
    """

    def __init__(self, path: Path):
        self.path, self.tree = path, Tree()
        self._generation, self._end = b"", _HEADER_BYTES

    def read(self) -> None:
        """
        Read what was written since the last time; another process may be writing.

        Raises:
            IndexFileError: it is missing, or is not whole.
            OSError: it cannot be read now.
        """
        try:
            with open_file(self.path) as file:
                generation = self._read_header(file)
                if generation != self._generation:
                    self._forget()
                self._generation = generation
                size = os.fstat(file.fileno()).st_size
                if size < self._end:
                    raise IndexFileError(f"{self.path} was cut off.")
                file.seek(self._end)
                # In pieces: a file may have a size that nobody has written.
                while size - self._end >= _RECORD_BYTES:
                    if not self._apply(read_all(file, min(size - self._end, _RECORDS_AT_ONCE * _RECORD_BYTES))):
                        raise IndexFileError(f"{self.path} was cut off.")
        except BaseException as error:
            # The tree may have half of a change.
            self._forget()
            if isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and is_damage(error)):
                raise IndexFileError(f"{self.path} cannot be read: {error.strerror or error}.") from error
            raise

    def add(self, node: Node) -> None:
        """
        Write that a node came. Only for the holder of the folder's lock, who has read the index.

        Raises:
            OSError: it cannot be written.
        """
        self._append([_record(_CAME, node)])

    def remove(self, ids: Iterable[bytes]) -> None:
        """
        Write that nodes went. Only for the holder of the folder's lock, who has read the index.

        Raises:
            OSError: it cannot be written.
        """
        self._append([_record(_WENT, self.tree.nodes[each]) for each in ids])

    def replace(self, nodes: Iterable[Node], unfinished: Path) -> None:
        """
        Write the index anew. Only for the holder of the folder's lock.

        Args:
            nodes: all of them.
            unfinished: a path in the same file system for the file that is not whole yet.

        Raises:
            OSError: it cannot be written; the old one is there still.
        """
        header = _HEADER.pack(_MAGIC, VERSION, secrets.token_bytes(16))
        records = b"".join(_record(_CAME, node) for node in nodes)
        with renamed_when_whole(unfinished, self.path, private) as file:
            write_all(file, header + _checksum(header) + records)
        self.read()

    @property
    def is_long(self) -> bool:
        """Whether most of it is about nodes that went."""
        num_records = (self._end - _HEADER_BYTES) // _RECORD_BYTES
        return num_records > 2 * len(self.tree.nodes) + _SPARE_RECORDS

    def _forget(self) -> None:
        self.tree = Tree()
        self._generation, self._end = b"", _HEADER_BYTES

    def _read_header(self, file: BinaryIO) -> bytes:
        start = read_all(file, _HEADER_BYTES)
        header, checksum = start[: _HEADER.size], start[_HEADER.size :]
        if checksum != _checksum(header):  # which a file that is cut off lacks
            raise IndexFileError(f"{self.path} does not begin as an index.")
        magic, version, generation = _HEADER.unpack(header)
        if magic != _MAGIC or version != VERSION:
            raise IndexFileError(f"{self.path} is no index of version {VERSION}.")
        assert isinstance(generation, bytes)
        return generation

    def _append(self, records: list[bytes]) -> None:
        # A process that ended may have left a part of a record after the last whole one.
        with open_file(self.path, "rb+") as file:
            file.seek(self._end)
            write_all(file, b"".join(records))
            sync(file)
        self.read()

    def _apply(self, log: bytes) -> int:
        """Apply whole records, and return how many bytes they have; of the last one only a part may be there yet."""
        whole = memoryview(log)[: len(log) - len(log) % _RECORD_BYTES]
        start = 0
        for kind, *fields, block, checksum in _RECORD_AND_CHECKSUM.iter_unpack(whole):
            if checksum != zlib.crc32(whole[start : start + _RECORD.size]):
                raise IndexFileError(f"{self.path} was altered at byte {self._end + start:,}.")
            node = Node._make((*fields, block))
            if kind == _WENT:
                self.tree.remove(node.id)
            else:
                if node.num_tokens < BLOCK_TOKENS:
                    node = node._replace(first_block=block[: node.num_tokens * TOKEN_BYTES])
                self.tree.add(node)
                if not self.tree.is_in_order(node.id):
                    raise IndexFileError(f"{self.path} has {node.id.hex()} in another place than its parent's.")
            start += _RECORD_BYTES
        self._end += start
        return start


def _record(kind: int, node: Node) -> bytes:
    record = _RECORD.pack(kind, *node)
    return record + _checksum(record)


def _checksum(data: bytes) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(data))
