"""Finding the nodes that have the beginning of a prompt."""

from collections.abc import Callable
from typing import NamedTuple

from .node_file import NO_PARENT, NodeFile
from .tokens import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, num_common
from .tree import Node, Tree


class Part(NamedTuple):
    """
    The beginning of a node's run, as a part of a prompt.

    In a match of whole nodes the prompt has all of the run; but the next part begins at a block border and has what
    follows that border, too, so that up to 63 tokens at the end of the run are not of this part.

    Attributes:
        file: of the node.
        num_tokens: of its run that are read from it, after the `file.head.start` tokens before it.
    """

    file: NodeFile
    num_tokens: int

    @property
    def end(self) -> int:
        return self.file.head.start + self.num_tokens


class Search:
    """
    A search for the longest beginning of a prompt that is in the files of nodes.

    Digests say which nodes to look at; what counts are the tokens in their files. Beside the digests of the prompt a
    search takes a look-up a block, a search by halves, and the heads of the nodes that it goes through.

    Args:
        tree: of the nodes.
        read: reads the file of a node; `None` if it is not there.
        digests: of the prompt's blocks.
        tokens: of the prompt, as bytes.
        whole_nodes: whether the prompt must have all tokens of each node, and each but the first begin at the last
            block border of its parent.
    """

    def __init__(
        self,
        tree: Tree,
        read: Callable[[Node], NodeFile | None],
        digests: list[bytes],
        tokens: bytes,
        whole_nodes: bool,
    ):
        self._tree, self._read, self._digests, self._tokens = tree, read, digests, tokens
        self._whole_nodes = whole_nodes
        self._files: dict[bytes, NodeFile | None] = {}
        self._unusable: set[bytes] = set()

    def longest(self) -> tuple[Part, ...]:
        """
        Return the parts in order, without holes; nothing if no token is stored.

        Of several ways to the same token the one whose last node begins first is taken.
        """
        if self._whole_nodes:
            ways = map(self._way_to, self._tree.whole_runs(self._digests, self._tokens))
            return next(filter(None, ways), ())
        while (node := self._best()) is not None:
            if parts := self._way_to(node):
                return parts
            self._unusable.add(node.id)
        return ()

    def _best(self) -> Node | None:
        """Return the node that goes furthest along the prompt, whether it can be reached or not."""
        best, rank = None, (0, 0)
        for node in sorted(self._tree.whole_first_blocks(self._digests, self._tokens), key=lambda each: -each.end):
            if node.end < rank[0]:
                break
            if node.id not in self._unusable and (own_rank := (self._reach(node), -node.start)) > rank:
                best, rank = node, own_rank
        furthest = rank[0]
        # Only where these end can another one go further with less than its first block.
        blocks = furthest // BLOCK_TOKENS
        following = self._tokens[blocks * BLOCK_BYTES : (blocks + 1) * BLOCK_BYTES]
        nearest = self._tree.nearest_first_block(self._digests[blocks], following, self._unusable)
        if nearest is not None and blocks * BLOCK_TOKENS + nearest[1] > furthest:
            return nearest[0]
        return best

    def _reach(self, node: Node) -> int:
        """Return up to which token of the prompt the run of a node goes; 0 if its file is of no use."""
        if node.id not in self._files:
            self._files[node.id] = self._read(node)
        file = self._files[node.id]
        if file is None:
            return 0
        return node.start + num_common(file.head.tokens, self._tokens[node.start * TOKEN_BYTES :])

    def _way_to(self, node: Node) -> tuple[Part, ...]:
        """Return the parts from the first token into a node; nothing if one of them is missing."""
        parts: list[Part] = []
        end = self._reach(node)
        while True:
            reach, file = self._reach(node), self._files[node.id]
            if file is None or end > reach:
                return ()
            if self._whole_nodes and not (reach == node.end < end + BLOCK_TOKENS):
                return ()
            parts.append(Part(file, end - node.start))
            if node.parent == NO_PARENT:
                return tuple(parts[::-1])
            parent = self._tree.nodes.get(node.parent)
            if parent is None:
                return ()
            node, end = parent, node.start
