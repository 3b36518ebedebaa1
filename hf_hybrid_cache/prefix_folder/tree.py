"""
The tree over tokens, in memory: which nodes there are, and which of them a prompt may go through.

A node is a run of tokens that begins at a block border. Its parent is the node that has the tokens before it, up to
that border, which may be in the middle of the parent's run: so a prompt that leaves a run adds a node, and no file
changes. Nodes may overlap: two prompts that were added at once, or a node that says anew what its parent's last tokens
are.

Nodes are kept by the digest of what is before them, each with its first block, sorted; and by the digest of the whole
blocks up to their end. A prompt asks for the digests of its own blocks, so a search costs one look-up a block of the
prompt, however many nodes there are.
"""

from bisect import bisect_left
from collections.abc import Iterator, Set
from typing import NamedTuple

from .node_file import NO_PARENT, NodeHead
from .tokens import BLOCK_BYTES, TOKEN_BYTES, node_id, num_common


class Node(NamedTuple):
    """
    A node of the tree.

    Attributes:
        id: of the node.
        parent: id of the parent, or `NO_PARENT`.
        prefix_digest: of the tokens before it.
        end_digest: of the whole blocks up to its end.
        start: number of tokens before it.
        num_tokens: of its run.
        file_bytes: size of its file.
        first_block: its first tokens, as bytes: a block, or fewer.
    """

    id: bytes
    parent: bytes
    prefix_digest: bytes
    end_digest: bytes
    start: int
    num_tokens: int
    file_bytes: int
    first_block: bytes

    @classmethod
    def of(cls, head: NodeHead) -> "Node":
        return cls(
            head.id,
            head.parent,
            head.prefix_digest,
            head.end_digest,
            head.start,
            head.num_tokens,
            head.file_bytes,
            head.tokens[:BLOCK_BYTES],
        )

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Tree:
    """
    Nodes by id, by parent, by the tokens before them, and by those up to their end.

    Attributes:
        nodes: by id.
        num_bytes: size of all files.
    """

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.num_bytes = 0
        self._children: dict[bytes, set[bytes]] = {}
        self._following: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self._unsorted: set[bytes] = set()
        self._ending: dict[bytes, set[bytes]] = {}

    def add(self, node: Node) -> None:
        """Add a node, in place of one with its id."""
        self.remove(node.id)
        self.nodes[node.id] = node
        self.num_bytes += node.file_bytes
        self._children.setdefault(node.parent, set()).add(node.id)
        self._following.setdefault(node.prefix_digest, []).append((node.first_block, node.id))
        self._unsorted.add(node.prefix_digest)
        self._ending.setdefault(node.end_digest, set()).add(node.id)

    def is_in_order(self, own_id: bytes) -> bool:
        """
        Whether a node begins within its parent, after its first token, as far as that is known; and its children too.

        So no way goes in a circle.
        """
        node = self.nodes[own_id]
        pairs = [(node, self.nodes[each]) for each in self.children(own_id)]
        if node.parent in self.nodes:
            pairs.append((self.nodes[node.parent], node))
        return (node.start > 0) == (node.parent != NO_PARENT) and all(
            parent.start < child.start <= parent.end for parent, child in pairs
        )

    def remove(self, own_id: bytes) -> None:
        """Remove a node, if there is one."""
        node = self.nodes.pop(own_id, None)
        if node is None:
            return
        self.num_bytes -= node.file_bytes
        # What is empty then stays until the log is written anew.
        self._children[node.parent].remove(own_id)
        self._ending[node.end_digest].remove(own_id)
        following = self._sorted(node.prefix_digest)
        del following[bisect_left(following, (node.first_block, own_id))]

    def children(self, own_id: bytes) -> Set[bytes]:
        return self._children.get(own_id, frozenset())

    def with_descendants(self, own_id: bytes) -> list[bytes]:
        """Return a node and all that continue it, each after those that continue it."""
        found = [own_id]
        for each in found:
            found.extend(sorted(self.children(each)))
        return found[::-1]

    def way_to(self, own_id: bytes) -> list[Node]:
        """Return the nodes from the first token to a node; nothing if there is none."""
        way: list[Node] = []
        while own_id in self.nodes:
            way.append(self.nodes[own_id])
            own_id = way[-1].parent
        return way[::-1]

    def whole_first_blocks(self, digests: list[bytes], tokens: bytes) -> Iterator[Node]:
        """Yield the nodes that a prompt goes into for at least a whole block."""
        for index, digest in enumerate(digests[:-1]):
            if digest not in self._following:
                continue
            block = tokens[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            following = self._sorted(digest)
            for place in range(bisect_left(following, (block, b"")), len(following)):
                first_block, own_id = following[place]
                if first_block != block:
                    break
                yield self.nodes[own_id]

    def whole_runs(self, digests: list[bytes], tokens: bytes) -> Iterator[Node]:
        """Yield the nodes whose run, and what is before it, a prompt has to the end, the furthest first."""
        for index in range(len(digests) - 1, -1, -1):
            digest, found = digests[index], []
            for own_id in self._ending.get(digest, ()):
                node = self.nodes[own_id]
                last_tokens = tokens[index * BLOCK_BYTES : node.end * TOKEN_BYTES]
                if own_id == node_id(node.parent, node.start, digest, last_tokens):
                    found.append(node)
            yield from sorted(found, key=lambda node: -node.end)

    def nearest_first_block(self, digest: bytes, block: bytes, but: Set[bytes]) -> tuple[Node, int] | None:
        """
        Return the node whose first block has the most tokens in common with those that follow a prefix.

        Args:
            digest: of the prefix.
            block: the tokens that follow it, up to a block.
            but: nodes that are left out.

        Returns:
            the node, and the number of tokens; `None` if there is none with any.
        """
        following = self._sorted(digest)
        place = bisect_left(following, (block, b""))
        # The most in common is beside the place of the block in the order of tokens.
        sides = (range(place - 1, -1, -1), range(place, len(following)))
        nearest = [next((following[at] for at in side if following[at][1] not in but), None) for side in sides]
        found = [(num_common(each[0], block), each[1]) for each in nearest if each is not None]
        common, own_id = max(found, default=(0, b""))
        return (self.nodes[own_id], common) if common else None

    def _sorted(self, digest: bytes) -> list[tuple[bytes, bytes]]:
        following = self._following.get(digest, [])
        if digest in self._unsorted:
            following.sort()
            self._unsorted.discard(digest)
        return following
