"""
The database of a store: which nodes there are, and what tokens they have.

A node is a run of tokens whose states can be used to its end. Its parent is the node that ends where it begins. It is
found by the digest of all keys up to its end, so a search reads no nodes but those of the prompt.

It is one file of SQLite with a journal, because its log for writing ahead works neither on network file systems nor in
a folder that cannot be written. A connection lives as long as a call.
"""

import json
import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ..errors import HybridCacheError
from .errors import PrefixStoreFolderError
from .keys import KEY_BYTES

# Raise it when the folder means something else.
VERSION = 4
NAME = re.compile("[0-9a-f]{32}")
_APPLICATION = 0x68666B76
_SCHEMA = (
    """CREATE TABLE node (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    parent INTEGER REFERENCES node (id),
    prefix TEXT NOT NULL,
    digest TEXT NOT NULL,
    start INTEGER NOT NULL,
    keys BLOB NOT NULL,
    file_bytes INTEGER NOT NULL,
    description TEXT NOT NULL
)""",
    "CREATE INDEX node_digest ON node (digest)",
    "CREATE INDEX node_parent ON node (parent)",
    # Of those after a prefix the one with most of a prompt's next keys is beside these in the order of keys.
    "CREATE INDEX node_prefix ON node (prefix, keys)",
    "CREATE INDEX node_bytes ON node (file_bytes)",  # so that their sum reads no keys
)
_COLUMNS = "id, name, parent, prefix, digest, start, keys, file_bytes"
_ROWS = [(int, str, parent, str, str, int, bytes, int) for parent in (int, type(None))]


class Node(NamedTuple):
    """
    A node.

    Attributes:
        id: of its row.
        name: of its file, and of the node.
        parent: id of the node before it; `None` if it begins with the first token.
        prefix: digest of the identity and the keys before it, see `end_digests`.
        digest: of the identity and the keys up to its end.
        start: number of tokens before it.
        keys: of its run, as bytes.
        file_bytes: size of its file.
    """

    id: int
    name: str
    parent: int | None
    prefix: str
    digest: str
    start: int
    keys: bytes
    file_bytes: int

    @property
    def end(self) -> int:
        return self.start + len(self.keys) // KEY_BYTES


class DamagedDatabaseError(HybridCacheError, ValueError):
    """The database cannot be read; it is made again from the files."""


@contextmanager
def transaction(path: Path, lock_seconds: float, has_locks: bool, changes: bool) -> Iterator["Nodes"]:
    """Read the nodes as they are now, or change them while nobody else does; after an error they are as before."""
    uri, folder = f"file:{quote(os.fsencode(path))}?mode=rw{'' if has_locks else '&nolock=1'}", path.parent
    try:
        # A change of one thread is never that of another one.
        with closing(sqlite3.connect(uri, lock_seconds, isolation_level=None, uri=True)) as connection:
            connection.text_factory = lambda data: str(data, errors="replace")
            connection.executescript("PRAGMA synchronous = FULL; PRAGMA trusted_schema = OFF")
            try:
                connection.execute("BEGIN IMMEDIATE" if changes else "BEGIN")
                if changes and not _schema(connection):
                    _make(connection)
                _require_schema(connection, path)
                yield Nodes(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_CANTOPEN and folder.is_dir() and not path.exists():
            raise DamagedDatabaseError(f"{path} is gone.") from error
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise PrefixStoreFolderError(
                folder, f"has been locked by another process for {lock_seconds} s. Is one stopped?"
            ) from error
        raise PrefixStoreFolderError(folder, f"cannot be {'changed' if changes else 'read'}: {error}.") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # or its message has bytes of the file
        raise DamagedDatabaseError(f"{path} cannot be read: {error}.") from error


class Nodes:
    """The nodes, within a transaction."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection

    def add(self, node: Node, description: str) -> None:
        """Add a node, whatever its id is."""
        values = (*node[1:], description)
        self._connection.execute(
            f"INSERT INTO node ({_COLUMNS}, description) VALUES (NULL, {', '.join('?' * len(values))})", values
        )

    def remove(self, ids: Collection[int]) -> None:
        """Remove nodes."""
        self._connection.executemany("DELETE FROM node WHERE id = ?", [(each,) for each in ids])

    def named(self, name: str) -> Node | None:
        """Return the node of a name."""
        return next(self._select("WHERE name = ?", name), None)

    def all(self) -> Iterator[Node]:
        """Yield all nodes, each after its parent."""
        return self._select("ORDER BY start")

    def require_integrity(self) -> None:
        """Raise `DamagedDatabaseError` unless all pages of the database are whole and fit each other."""
        (found,) = self._connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise DamagedDatabaseError(f"The database is damaged: {found}.")

    def descriptions(self) -> dict[int, str]:
        """Return the description of each node, by id."""
        return dict(self._connection.execute("SELECT id, description FROM node"))

    def num_bytes(self) -> int:
        """Return the size of all files."""
        return int(self._connection.execute("SELECT coalesce(sum(file_bytes), 0) FROM node").fetchone()[0])

    def children(self, node: Node) -> Iterator[Node]:
        """Yield the nodes that continue a node."""
        return self._select("WHERE parent = ?", node.id)

    def with_descendants(self, node: Node) -> list[Node]:
        """Return a node and all that continue it, each after those that continue it."""
        found = [node]
        for each in found:
            found.extend(child for child in self.children(each) if child.start > each.start)
        return found[::-1]

    def way_to(self, node: Node | None) -> list[Node]:
        """Return the nodes from the first token to a node; nothing if there is no way."""
        return [] if node is None else way_to(node, lambda id: next(self._select("WHERE id = ?", id), None))

    def same(self, node: Node) -> Node | None:
        """Return the node with the parent and the keys of another one."""
        return next(self._select("WHERE digest = ? AND parent IS ?", node.digest, node.parent), None)

    def longest(self, ends: Mapping[str, int], keys: bytes, but: Collection[int] = ()) -> list[Node]:
        """
        Return the nodes, from the first token on, that have the longest beginning of a prompt; nothing if none has any.

        `ends` are where they may end, see `end_digests`. Of several ways to one token the one whose last node begins
        first is taken.
        """
        found = {
            node.id: node
            for node in self._select("WHERE digest IN (SELECT value FROM json_each(?))", json.dumps([*ends]))
        }
        for node in found.values():
            if ends[node.digest] != node.end or not keys.startswith(node.keys, node.start * KEY_BYTES):
                raise DamagedDatabaseError(f"The node {node.name} has other keys.")
        ways = (way_to(node, found.get) for node in sorted(found.values(), key=lambda node: (-node.end, node.start)))
        return next((way for way in ways if way and not any(node.id in but for node in way)), [])

    def beside(self, prefix: str, keys: bytes) -> Iterator[Node]:
        """Yield two of the nodes after a prefix, of which one has as many of these keys in common as any."""
        for comparison, order in (("<=", "DESC"), (">", "ASC")):
            yield from self._select(
                f"WHERE prefix = ? AND keys {comparison} ? ORDER BY keys {order} LIMIT 1", prefix, keys
            )

    def _select(self, condition: str, *values: Any) -> Iterator[Node]:
        return map(_node, self._connection.execute(f"SELECT {_COLUMNS} FROM node {condition}", values))


def _node(row: Sequence[Any]) -> Node:
    """Return a node from a row, whose types SQLite does not check."""
    node = Node._make(row)
    is_right = tuple(map(type, row)) in _ROWS and NAME.fullmatch(node.name)
    if not is_right or not node.keys or len(node.keys) % KEY_BYTES:
        raise DamagedDatabaseError(f"A row is no node: {row[:2]}.")
    return node


def way_to(node: Node, with_id: Callable[[int], Node | None]) -> list[Node]:
    """Return the nodes from the first token to a node; nothing if one is missing, or they leave a hole."""
    way = [node]
    while way[-1].parent is not None:
        parent = with_id(way[-1].parent)
        if parent is None or parent.end != way[-1].start:
            return []
        way.append(parent)
    return [] if way[-1].start else way[::-1]


def _schema(connection: sqlite3.Connection) -> tuple[str, ...]:
    found = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid")
    return tuple(sql for (sql,) in found)


def _make(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    for statement in _SCHEMA:
        connection.execute(statement)


def _require_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise an error if a database is damaged, of another program, or of another version."""
    (application,), (version,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    if (application, version) == (_APPLICATION, VERSION):
        if _schema(connection) != _SCHEMA:
            raise DamagedDatabaseError(f"{path} has other tables.")
    elif application == _APPLICATION:
        raise PrefixStoreFolderError(
            path.parent, f"is a prefix store of version {version}, and this one is {VERSION}: give another folder."
        )
    elif _schema(connection):
        raise PrefixStoreFolderError(path.parent, f"has {path.name} of another program: give another folder.")
    else:
        raise DamagedDatabaseError(f"{path} is empty.")
