"""
The folder of a store, in which prompts, each with states, survive the process.

All is in `nodes-VERSION/`: a file for each node, see `node_files.py`, those that are being written, and `lock`, which
who changes the folder holds. A file is written and synced before it gets its name. So a process that is killed leaves a
node or none, and an unfinished file that who comes next removes.
"""

import contextlib
import math
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from ..files.tensor_file import CacheFileError, Section
from ..scalars import bytes_text, num_common_keys
from ..system.durable_files import sync_folder
from .errors import NodeInUseError, NodeNotFoundError, PrefixStoreFolderError, PrefixStoreFullError
from .keys import end_digests, identity_digest
from .node_files import VERSION, Head, Node, Nodes, begin, require_damage
from .private_files import is_own, locked, reported

_NODES, _LOCK = f"nodes-{VERSION}", "lock"
# Of those that follow a match the ones used last are compared with a prompt, 0.5 ms each.
_MOST_COMPARED = 32


class Match:
    """
    The stored beginning of a prompt: nodes in order, without holes. It is in use until it is closed.

    While it is in use the store does not remove its nodes: the last file's lock is shared, which protects those before
    it, which it continues. Where there are no locks it may; opening them then fails with `CacheFileError`. A process
    that is forked meanwhile uses them, too, until it ends.
    """

    def __init__(self, nodes: Sequence[Node] = (), num_tokens: int = 0, pin: BinaryIO | None = None):
        self.nodes, self.num_tokens, self._pin = nodes, num_tokens, pin

    def close(self) -> None:
        if self._pin is not None:
            self._pin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Folder:
    """
    A folder of prompts, found again by all keys up to where one of their nodes ends.

    Several threads and processes may use one folder: one of them changes it at a time, and others search meanwhile,
    without a lock. A node in use is not removed. Where there are no locks (Windows, some network file systems) one
    process at a time may write; others may read, and what they find is right.

    A checksum tells of files that were altered, not of those that somebody forged: the folder is its owner's alone.

    Args:
        path: of the folder; it is made if there is none, and must be empty if it is no store yet.
        max_bytes: the most that files of nodes may have together; `None` for no limit but the disk's.
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
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._min_free_bytes, self._lock_seconds = min_free_bytes, lock_seconds
        self._require_readable = require_readable
        self._folder = self.path / _NODES
        with reported(self.path, "cannot be used as a store"):
            self._make()

    def find(self, identity: bytes, keys: np.ndarray) -> Match:
        """Find the longest stored beginning of a prompt, `[tokens]`; it is in use until the match is closed."""
        root = identity_digest(identity)
        ends = end_digests(root, keys)
        with reported(self.path, "cannot be read"):
            # What is gone by now, the next search does not find.
            while (match := self._in_use(self._nodes(), root, ends)) is None:
                pass
        return match

    def nearest(self, identity: bytes, keys: np.ndarray, match: Match) -> np.ndarray:
        """Return the keys of the node, of those used last after a match, with most of a prompt's next, `[tokens]`."""
        last = match.nodes[-1].end if match.nodes else identity_digest(identity)
        beside = sorted(self._nodes().that_start(last), key=lambda node: node.last_use)[-_MOST_COMPARED:]
        following, heads = keys[match.num_tokens :], filter(None, (node.head() for node in beside))
        return max((head.keys for head in heads), key=lambda each: num_common_keys(each, following), default=keys[:0])

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
        root = identity_digest(identity)
        ends = end_digests(root, keys)
        *before, (end, last) = ends.items()
        with contextlib.ExitStack() as stack:
            with self._changing() as nodes:
                with self._in_use(nodes, root, ends) or Match() as stored:
                    if stored.num_tokens == len(keys):
                        return stored.nodes[-1].name
                assert last == len(keys) > start
                # Another process may have added more than is kept here.
                begun = self._in_use(nodes, root, {digest: count for digest, count in before if count <= start})
                match = stack.enter_context(begun or Match())
                if match.num_tokens != start:
                    raise NodeNotFoundError(
                        f"{self.path} has {match.num_tokens:,} tokens of the prompt; new ones cannot begin after "
                        f"{start:,}."
                    )
                node = Node(self._folder, end, match.nodes[-1].end if match.nodes else root)
                new = node.new_file(Head(root, keys[start:], description, states), sections)
                self._make_room(nodes, new.num_bytes)
                unfinished, file = begin(self._folder, new.num_bytes)
                stack.callback(_remove_if_there, unfinished)
                stack.enter_context(file)
            with reported(self.path, "cannot be written"):
                new.write(file)
                os.fsync(file.fileno())
            with self._changing() as nodes:
                if start and not nodes.that_end(node.start):
                    raise NodeNotFoundError(f"{self.path} has lost the tokens before the prompt that was being kept.")
                if nodes.named(node.name) is None:  # another one may have written it meanwhile
                    file.close()  # Windows renames no open file
                    os.replace(unfinished, node.path)
                    sync_folder(self._folder)
            return node.name

    def prompts(self) -> list[list[tuple[Node, Head]]]:
        """List the nodes, with their heads, of each prompt that no other one continues, the one used last first."""
        nodes = self._nodes()
        ways = filter(None, (nodes.way_to(last) for last in nodes if not nodes.that_start(last.end)))
        return sorted(ways, key=lambda way: (-way[-1][0].last_use, way[-1][0].name))

    def keys(self, name: str) -> np.ndarray:
        """Return all keys of a prompt up to the end of a node, `[tokens]`; raise `NodeNotFoundError` if it is gone."""
        nodes = self._nodes()
        if not (way := nodes.way_to(nodes.named(name))):
            raise NodeNotFoundError(f"{self.path} has no node {name}.")
        return keys_of(way)

    def remove(self, name: str) -> None:
        """Remove a node and all that continue it; `NodeInUseError` if one is in use, `NodeNotFoundError` without it."""
        with self._changing() as nodes:
            if (node := nodes.named(name)) is None:
                raise NodeNotFoundError(f"{self.path} has no node {name}.")
            going = nodes.with_descendants(node)
            if any(each.is_in_use for each in going) or not self._delete(going):
                raise NodeInUseError(f"{self.path} uses the node {name}, or one that continues it.")

    def remove_unshared(self, name: str, but: Collection[str] = ()) -> None:
        """
        Remove the last node of a prompt, and those before it, up to one that another node continues.

        Nodes that end at one of the digests `but` stay. Nothing happens if there is no such node. At one in use
        `NodeInUseError` is raised; it and those before it are there still.
        """
        with self._changing() as nodes:
            node, gone = nodes.named(name), set[Node]()
            while node is not None and node.end not in but and gone.issuperset(nodes.that_start(node.end)):
                if not self._delete([node]):
                    raise NodeInUseError(f"{self.path} uses the node {name}, or one before it.")
                gone.add(node)
                node = next(iter(nodes.that_end(node.start)), None)

    def damages(self) -> dict[str, str]:
        """Read everything and compare it with its checksums; return what is wrong, by the names of the nodes."""
        with self._changing() as nodes:
            nodes.reserved()
        found = {node: self._damage(nodes, node) for node in nodes}
        # What was removed meanwhile is not damaged.
        return {node.name: reason for node, reason in found.items() if reason and os.path.lexists(node.path)}

    def remove_damaged(self, name: str) -> bool:
        """
        Verify a node that does not seem right, and remove it and all that continue it if it is not, even in use.

        Then it warns, and returns true.
        """
        with self._changing() as nodes:
            node = nodes.named(name)
            reason = None if node is None else self._damage(nodes, node)
            if node is not None and reason:
                self._delete(nodes.with_descendants(node), by_force=True)
        if reason:
            warnings.warn(f"{reason} It was removed from the store.", stacklevel=2)
        return reason is not None

    def _in_use(self, nodes: Nodes, root: str, ends: Mapping[str, int]) -> Match | None:
        """Return the longest beginning of a prompt with these ends, which is in use now; `None` if it is gone."""
        if not (way := nodes.longest(root, ends)):
            return Match()
        if (pin := way[-1].pin(self._lock_seconds)) is None:
            return None
        for node in way:
            node.note_use()
        return Match(way, ends[way[-1].end], pin)

    def _make_room(self, nodes: Nodes, num_bytes: int) -> None:
        """Remove nodes until so many bytes fit; raise `PrefixStoreFullError` if that is not enough."""
        of_others, unwritten = nodes.reserved()
        free = shutil.disk_usage(self.path).free - unwritten
        used = of_others + sum(node.num_bytes for node in nodes)
        excess = num_bytes + max(self._min_free_bytes - free, used - self._max_bytes)
        if excess <= 0:
            return
        going: list[Node] = []
        removable = 0
        for node in _in_order_of_removal(nodes):
            going.append(node)
            removable += node.num_bytes
            if removable >= excess and self._delete(going):
                return
        limit = "" if self._max_bytes == math.inf else f" of {bytes_text(self._max_bytes)}"
        of_disk = f"the disk has {bytes_text(free)}, of which {bytes_text(self._min_free_bytes)} stay free"
        is_disk_full = self._min_free_bytes - free > used - self._max_bytes
        raise PrefixStoreFullError(
            self.path,
            f"has no room for {bytes_text(num_bytes)} more: it has {bytes_text(used)}{limit}, of which "
            f"{bytes_text(removable)} can be removed, and {of_disk}. "
            f"{'Free' if is_disk_full else 'Raise max_bytes, free'} some, or close what is in use.",
        )

    def _delete(self, going: Sequence[Node], by_force: bool = False) -> bool:
        """Remove nodes, each after those that continue it, up to the first one in use; return whether all are gone."""
        are_gone = all(node.unlink(by_force) for node in going)
        sync_folder(self._folder)
        return are_gone

    def _make(self) -> None:
        self.path.mkdir(0o700, parents=True, exist_ok=True)
        names = set(os.listdir(self.path))
        if _NODES not in names:
            if old := sorted(each for each in names if each.startswith("nodes-")):
                raise PrefixStoreFolderError(
                    self.path,
                    f"is a store of another version ({old[0]}), which version {VERSION} does not read: give another "
                    "folder, where prompts are read again, and remove this one.",
                )
            if names:
                raise PrefixStoreFolderError(
                    self.path, f"is no store and has other files ({min(names)}): give a folder of its own."
                )
            self.path.chmod(0o700)
            self._folder.mkdir(0o700, exist_ok=True)
        if not is_own(self._folder):
            raise PrefixStoreFolderError(
                self.path,
                f"has {_NODES}, which is a link, something else, or of another user: give another folder, or remove "
                "it.",
            )

    def _nodes(self) -> Nodes:
        """Return the nodes as they are now."""
        with reported(self.path, "cannot be read"):
            return Nodes(self._folder)

    @contextmanager
    def _changing(self) -> Iterator[Nodes]:
        """Hold the lock of the folder, which lets one change it at a time; give the nodes as they are then."""
        with reported(self.path, "cannot be changed"), locked(self._folder / _LOCK, self._lock_seconds):
            yield Nodes(self._folder)

    def _damage(self, nodes: Nodes, node: Node) -> str | None:
        """Read all of the file of a node, and return what is wrong with it."""
        try:
            file, head = node.open()
            with file:
                for section in file.sections:
                    file.read(section, {})
            self._require_readable(head)
        except CacheFileError as error:
            require_damage(node.path, error)
            return str(error)
        except ValueError as error:
            return f"{node.path} is of no use to this version: {error}."
        if node.start != head.identity and not nodes.that_end(node.start):
            return f"{node.path} continues a prompt that is gone."
        return None


def _remove_if_there(unfinished: Path) -> None:
    with contextlib.suppress(OSError):  # whoever comes next removes it
        unfinished.unlink(missing_ok=True)


def _in_order_of_removal(nodes: Nodes) -> Iterator[Node]:
    """Yield the nodes that may go, the one used longest ago first of those that no other continues any more."""
    num_left = {node.end: len(nodes.that_start(node.end)) for node in nodes}
    waiting = [(node.last_use, node) for node in nodes if not num_left[node.end]]
    heapify(waiting)
    while waiting:
        _, node = heappop(waiting)
        if node.is_in_use:  # it stays, and so do those before it
            continue
        yield node
        if node.start in num_left:
            num_left[node.start] -= 1
            if not num_left[node.start]:
                for before in nodes.that_end(node.start):
                    heappush(waiting, (before.last_use, before))


def keys_of(way: Sequence[tuple[Node, Head]]) -> np.ndarray:
    """Return the keys of nodes that follow each other, `[tokens]`."""
    return np.concatenate([head.keys for _, head in way])
