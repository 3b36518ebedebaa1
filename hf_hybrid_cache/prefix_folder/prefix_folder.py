"""A folder in which prompts, each with a payload, survive the process."""

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bounds import Bounds
from .errors import NodeFileError, NodeInUseError, NodeNotFoundError, PrefixStoreFolderError, UnreadableNodeError
from .folder import Folder
from .match import Match
from .node_file import LONGEST_DESCRIPTION, NO_PARENT, NodeFile, NodeHead, write_node
from .node_folder import Entry
from .payload import PayloadWriter
from .search import Search
from .tokens import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, as_array, as_bytes, block_digests, node_id
from .tree import Node


class PrefixFolder:
    """
    A folder of prompts, found again by the longest common prefix of token ids.

    Several threads and processes may use one folder: each change takes a lock of the system, which ends with its
    process, and a search takes none. A node in use is not removed. Where there are no locks (Windows, some network file
    systems) one process at a time may write; others may read, and what they find is right. On NFS with locks another
    machine may find a prompt some seconds late.

    A checksum tells of files that were altered, not of those that somebody forged: the folder is its owner's alone.

    Args:
        path: of the folder; it is made if there is none, and must be empty if it is no store yet.
        max_bytes: the most that files of nodes may have together; `None` for no limit but the disk's.
        min_free_bytes: what stays free on the disk.
        lock_seconds: how long to wait for a process that holds a lock.
        require_readable: raises `ValueError` if a node of this head is of no use, such as one that another version
            wrote; then it is as if it were not there, but for `damages`.

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
        require_readable: Callable[[NodeHead], object] = lambda head: None,
    ):
        try:
            given = Path(path).expanduser().absolute()  # the working directory may change
        except RuntimeError as error:
            raise PrefixStoreFolderError(
                path, "cannot be found: there is no home folder. Give another path."
            ) from error
        except FileNotFoundError as error:
            raise PrefixStoreFolderError(path, "cannot be found: the working directory is gone.") from error
        self._folder = Folder(given, lock_seconds, require_readable)
        self._bounds = Bounds(max_bytes, min_free_bytes)

    @property
    def path(self) -> Path:
        return self._folder.path

    def find(self, identity: bytes, token_ids: Any, whole_nodes: bool = False) -> Match:
        """
        Find the longest stored beginning of a prompt, whose nodes are in use until the match is closed.

        Args:
            identity: of all that payloads depend on beside the tokens.
            token_ids: integers `[tokens]`.
            whole_nodes: find the longest chain of nodes that the prompt has all tokens of, for payloads that can only
                be used to their ends. Each begins at the last block border of the node before it.

        Raises:
            TokenIdsError: these are no token ids.
            PrefixStoreFolderError: the folder cannot be read.

        Warns:
            UserWarning: a file on the way is damaged; it is not used, and removed.
        """
        tokens = as_bytes(token_ids)
        return self._find(block_digests(identity, tokens), tokens, whole_nodes)

    def add(
        self,
        identity: bytes,
        token_ids: Any,
        start: int,
        num_bytes: int,
        write: Callable[[PayloadWriter], object],
        description: bytes = b"",
        whole_nodes: bool = False,
    ) -> bytes:
        """
        Add what follows the first `start` tokens of a prompt as a node.

        The prefix up to `start` must be stored: keep its match open meanwhile. A node begins at a block border, so
        what was stored of the last block beyond it is stored again, and no file changes: borders are where states are
        laid out, quantized and mapped. It may begin before the last one, where the last states have changed their form.

        Args:
            identity: as for `find`.
            token_ids: integers `[tokens]`, of the whole prompt.
            start: a multiple of 64, less than the number of tokens.
            num_bytes: size of the payload.
            write: writes the payload, of exactly this size, into the file that it gets.
            description: for lists, up to 1 MiB.
            whole_nodes: for a search of whole nodes. A chain of them must end at `start`, or less than a block after
                it, and the node is added unless one ends with the last token; longer nodes may have all its tokens.

        Returns:
            the id of the node with the last token: a new one, unless all these tokens are stored already.

        Raises:
            TokenIdsError: these are no token ids.
            NodeNotFoundError: the first `start` tokens are not stored so, or not any more.
            NodeFileError: `write` wrote more or less.
            PrefixFolderFullError: it does not fit the limits; nothing was written.
            PrefixStoreFolderError: it cannot be written; the store is as it was, but for what made room.
        """
        tokens = as_bytes(token_ids)
        run = tokens[start * TOKEN_BYTES :]
        assert start in range(0, len(tokens) // TOKEN_BYTES, BLOCK_TOKENS), start
        assert len(description) <= LONGEST_DESCRIPTION, len(description)
        digests = block_digests(identity, tokens)
        with self._find(digests, tokens, whole_nodes) as match:
            if match.num_tokens * TOKEN_BYTES == len(tokens):
                return match.parts[-1].file.head.id
        num_blocks = start // BLOCK_TOKENS
        # The whole nodes of the longest match need not have one that ends here. Being in use, what these are stays.
        prefix = tokens[: (start + BLOCK_TOKENS - 1) * TOKEN_BYTES]
        with self._find(digests[: num_blocks + 1], prefix, whole_nodes) as match:
            before = match.part_before(start)
            if start and before is None:
                raise NodeNotFoundError(
                    f"{self.path} has {match.num_tokens:,} tokens of the prompt{' in whole nodes' * whole_nodes}; "
                    f"new ones cannot begin after {start:,}."
                )
            parent = NO_PARENT if before is None else before.file.head.id
            own_id = node_id(parent, start, digests[-1], tokens[(len(digests) - 1) * BLOCK_BYTES :])
            head = NodeHead(own_id, parent, digests[num_blocks], digests[-1], start, run, description, num_bytes)
            self._write(head, write)
            return own_id

    def entries(self) -> list[Entry]:
        """
        List the nodes, the one used last first.

        Raises:
            PrefixStoreFolderError: the folder cannot be read.
        """
        entries = filter(None, map(self._folder.nodes.entry, self._nodes()))
        return sorted(entries, key=lambda entry: (-entry.last_use, entry.id))

    def token_ids(self, own_id: bytes) -> NDArray[np.int64]:
        """
        Return all tokens of a prompt up to the end of a node, `[tokens]`.

        Raises:
            NodeNotFoundError: there is none, or not any more.
            NodeFileError: its file, or that of a node before it, is damaged, or of no use.
            PrefixStoreFolderError: the folder cannot be read.
        """
        with self._folder.mutex:
            self._folder.refresh()
            nodes = self._folder.tree.way_to(own_id)
        tokens = bytearray()
        for node in nodes:
            if (file := self._folder.nodes.read(node)) is None:
                tokens.clear()
                break
            tokens[node.start * TOKEN_BYTES :] = file.head.tokens
        if not tokens:
            raise NodeNotFoundError(f"{self.path} has no node {own_id.hex()}.")
        return as_array(bytes(tokens))

    def remove(self, own_id: bytes) -> None:
        """
        Remove a node and all that continue it.

        Raises:
            NodeNotFoundError: there is none.
            NodeInUseError: it or one that continues it is in use; all are there still.
            PrefixStoreFolderError: the folder cannot be changed.
        """
        with self._folder.locked():
            if own_id not in self._folder.tree.nodes:
                raise NodeNotFoundError(f"{self.path} has no node {own_id.hex()}.")
            ids = self._folder.tree.with_descendants(own_id)
            if any(map(self._folder.nodes.is_in_use, ids)) or not self._folder.delete(ids):
                raise NodeInUseError(f"{self.path} uses the node {own_id.hex()}, or one that continues it.")

    def remove_unshared(self, own_id: bytes, except_tokens: int = 0) -> None:
        """
        Remove the last node of a prompt, and those before it, up to one that another node continues, which can be read.

        Args:
            own_id: of the last node; nothing happens if there is none.
            except_tokens: nodes that end with one of the first tokens, so many, stay.

        Raises:
            NodeInUseError: a node is in use; it and those before it are there still.
            PrefixStoreFolderError: the folder cannot be changed.
        """
        with self._folder.locked():
            nodes = self._folder.tree.nodes
            while (node := nodes.get(own_id)) is not None and node.end > except_tokens:
                following = (nodes[each] for each in self._folder.tree.children(own_id))
                if any(self._folder.nodes.entry(each) is not None for each in following):
                    return
                self.remove(own_id)
                own_id, nodes = node.parent, self._folder.tree.nodes

    def damages(self) -> dict[bytes, str]:
        """
        Read everything and compare it with its checksums; return what is wrong, or of no use, by the ids of the nodes.

        Raises:
            PrefixStoreFolderError: the folder cannot be read.
        """
        with self._folder.locked():
            self._folder.tidy()
        found = {node.id: self._damage(node) for node in self._nodes()}
        return {own_id: reason for own_id, reason in found.items() if reason}

    def remove_damaged(self, own_id: bytes) -> bool:
        """
        Verify a node that does not seem right, and remove it and all that continue it if it is not, even in use.

        Returns:
            whether it was damaged, or of no use.

        Raises:
            PrefixStoreFolderError: the folder cannot be changed.

        Warns:
            UserWarning: it was.
        """
        with self._folder.locked():
            node = self._folder.tree.nodes.get(own_id)
            reason = "" if node is None else self._damage(node)
            if reason:
                self._folder.delete(self._folder.tree.with_descendants(own_id), by_force=True)
        if reason:
            warnings.warn(f"{reason} It was removed from the store.", stacklevel=2)
        return bool(reason)

    def _find(self, digests: list[bytes], tokens: bytes, whole_nodes: bool) -> Match:
        damaged: set[bytes] = set()

        def read(node: Node) -> NodeFile | None:
            try:
                return self._folder.nodes.read(node)
            except UnreadableNodeError:
                return None
            except NodeFileError:
                damaged.add(node.id)
                return None

        with self._folder.mutex:
            while True:
                self._folder.refresh()
                ignored = set(damaged)
                parts = Search(self._folder.tree, read, digests, tokens, whole_nodes).longest()
                if new := damaged - ignored:
                    for own_id in new:
                        self._drop(own_id)
                    continue
                if not parts:
                    return Match()
                # What is gone by now, the next search does not find.
                if (pin := self._folder.nodes.pin(parts[-1].file)) is not None:
                    break
        for part in parts:
            self._folder.nodes.touch(part.file)
        return Match(parts, pin)

    def _drop(self, own_id: bytes) -> None:
        """Remove a node if it is damaged, and if the folder can be changed now."""
        try:
            self.remove_damaged(own_id)
        except PrefixStoreFolderError as error:
            warnings.warn(f"The damaged node {own_id.hex()} stays: {error}", stacklevel=2)

    def _write(self, head: NodeHead, write: Callable[[PayloadWriter], object]) -> None:
        with self._folder.locked():
            self._folder.make_room(head.file_bytes, self._bounds)
            path, file = self._folder.unfinished.begin(head.file_bytes)
        try:
            with file:
                try:
                    write_node(file, head, write)
                except OSError as error:
                    raise PrefixStoreFolderError(self.path, f"cannot be written: {error.strerror or error}.") from error
                self._folder.publish(path, file, head)
        finally:
            with contextlib.suppress(OSError):  # whoever looks next removes it
                path.unlink(missing_ok=True)

    def _nodes(self) -> list[Node]:
        with self._folder.mutex:
            self._folder.refresh()
            return list(self._folder.tree.nodes.values())

    def _damage(self, node: Node) -> str:
        """Return what is wrong with the file of a node; nothing if all is right, or it was removed meanwhile."""
        try:
            file = self._folder.nodes.read(node)
            if file is not None:
                file.verify()
        except NodeFileError as error:
            return str(error) if os.path.lexists(self._folder.nodes.path_of(node.id)) else ""
        return ""
