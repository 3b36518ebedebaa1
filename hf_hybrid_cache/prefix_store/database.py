"""
The database of a store: which nodes there are, and what tokens they have.

A node is a run of tokens that begins at a block border. Its parent is the node that has the tokens before it, up to
that border, which may be in the middle of the parent's run: so a prompt that leaves a run adds a node, and no file
changes. Nodes may overlap: two prompts that were added at once, or a node that says anew what its parent's last tokens
are.

It is one file of SQLite with a journal, because its log for writing ahead works neither on network file systems nor in
a folder that cannot be written. A connection lives as long as a call.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ..errors import HybridCacheError
from .errors import PrefixStoreFolderError
from .keys import BLOCK_BYTES, KEY_BYTES, num_common

# Raise it when the folder means something else.
VERSION = 2
NAME = re.compile("[0-9a-f]{32}")
_APPLICATION = 0x68666B76
_SCHEMA = (
    """CREATE TABLE node (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    parent INTEGER REFERENCES node (id),
    prefix TEXT NOT NULL,
    start INTEGER NOT NULL,
    keys BLOB NOT NULL,
    file_bytes INTEGER NOT NULL,
    description TEXT NOT NULL
)""",
    # The node that goes furthest along a prompt is beside the place of the prompt in the order of keys.
    "CREATE INDEX node_prefix ON node (prefix, keys)",
    "CREATE INDEX node_parent ON node (parent)",
    # What a search asks of all blocks of a prompt reads no keys, nor does it copy more of it than the longest run.
    "CREATE INDEX node_follows ON node (prefix)",
    "CREATE INDEX node_length ON node (length(keys))",
    "CREATE INDEX node_bytes ON node (file_bytes)",  # so that their sum reads no keys
)
_COLUMNS = "id, name, parent, prefix, start, keys, file_bytes"
_ROWS = [(int, str, parent, str, int, bytes, int) for parent in (int, type(None))]


class Node(NamedTuple):
    """
    A node.

    Attributes:
        id: of its row.
        name: of its file, and of the node.
        parent: id of the node before it; `None` if it begins with the first token.
        prefix: digest of the identity and the keys before it, see `prefix_digests`.
        start: number of tokens before it.
        keys: of its run, as bytes.
        file_bytes: size of its file.
    """

    id: int
    name: str
    parent: int | None
    prefix: str
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
    uri, folder = f"file:{quote(str(path))}?mode=rw{'' if has_locks else '&nolock=1'}", path.parent
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
        condition = "WHERE prefix = ? AND keys = ? AND parent IS ?"
        return next(self._select(condition, node.prefix, node.keys, node.parent), None)

    def longest(self, digests: Sequence[str], keys: bytes, whole_nodes: bool, but: Collection[int] = ()) -> list[Node]:
        """
        Return the nodes, from the first token on, that have the longest beginning of a prompt; nothing if none has any.

        Of several ways to the same token the one whose last node begins first is taken. With `whole_nodes` the prompt
        has all tokens of each node, and each but the first begins at the last block border of its parent.
        """
        left_out = set(but)
        (longest,) = self._connection.execute("SELECT coalesce(max(length(keys)), 0) FROM node").fetchone()
        while True:
            found: list[tuple[int, int, Node]] = []
            for index in self._known(digests):
                start, prefix = index * BLOCK_BYTES, digests[index]
                rest = keys[start : start + longest]
                near = self._whole(prefix, rest) if whole_nodes else self._beside(prefix, rest, left_out)
                for node in near:
                    if node.start * KEY_BYTES != start:
                        raise DamagedDatabaseError(f"The node {node.name} has another prefix.")
                    if node.id not in left_out and (common := num_common(node.keys, rest)):
                        found.append((node.start + common, -node.start, node))
            if not found:
                return []
            node = max(found)[2]
            way = self.way_to(node)
            if way and _is_of(way, digests, keys, whole_nodes) and not left_out.intersection(each.id for each in way):
                return way
            left_out.add(node.id)

    def _known(self, digests: Sequence[str]) -> list[int]:
        """Return the indices of digests that a node follows."""
        # Ten thousand prompts may follow one of them, and are not looked at.
        query = """SELECT value FROM json_each(?)
            WHERE EXISTS (SELECT 1 FROM node INDEXED BY node_follows WHERE prefix = value)"""
        known = {digest for (digest,) in self._connection.execute(query, [json.dumps(digests)])}
        return [index for index, digest in enumerate(digests) if digest in known]

    def _beside(self, prefix: str, rest: bytes, but: Collection[int]) -> Iterator[Node]:
        """Yield the nodes after a prefix that are beside the rest of a prompt in the order of keys."""
        others = f"AND id NOT IN ({', '.join(map(str, but))})"
        for comparison, order in (("<=", "DESC"), (">", "ASC")):
            condition = f"WHERE prefix = ? AND keys {comparison} ? {others} ORDER BY keys {order} LIMIT 1"
            yield from self._select(condition, prefix, rest)

    def _whole(self, prefix: str, rest: bytes) -> Iterator[Node]:
        """Yield the nodes after a prefix that the rest of a prompt has to the end, the longest first."""
        while rest:
            query = "SELECT max(keys) FROM node WHERE prefix = ? AND keys <= ?"
            (before,) = self._connection.execute(query, (prefix, rest)).fetchone()
            if before is None:
                return
            common = num_common(before, rest) * KEY_BYTES
            if common == len(before):
                yield from self._select("WHERE prefix = ? AND keys = ?", prefix, before)
                common -= KEY_BYTES
            # What is before all that differ there has no more in common.
            rest = rest[:common]

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
        if parent is None or not parent.start < way[-1].start <= parent.end:
            return []
        way.append(parent)
    return [] if way[-1].start else way[::-1]


def joined_keys(way: Iterable[Node]) -> bytes:
    """Return all keys of nodes, of which each follows the one before it."""
    keys = bytearray()
    for node in way:
        keys[node.start * KEY_BYTES :] = node.keys
    return bytes(keys)


def _is_of(way: Sequence[Node], digests: Sequence[str], keys: bytes, whole_nodes: bool) -> bool:
    """Return whether a prompt has the identity and the keys of all nodes on a way, up to where the next one begins."""
    for node, following in zip(way, [*way[1:], None], strict=True):
        rest = keys[node.start * KEY_BYTES : node.start * KEY_BYTES + len(node.keys)]
        needed = len(node.keys) // KEY_BYTES
        if not whole_nodes:
            needed = 1 if following is None else following.start - node.start
        elif following is not None and following.start != node.end - node.end % (BLOCK_BYTES // KEY_BYTES):
            return False
        if node.prefix != digests[node.start * KEY_BYTES // BLOCK_BYTES] or num_common(node.keys, rest) < needed:
            return False
    return True


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
