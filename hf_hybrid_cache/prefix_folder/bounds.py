"""The limits of a store, and the order in which nodes go."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .tree import Node, Tree


@dataclass(frozen=True)
class Bounds:
    """
    Limits of a store.

    Attributes:
        max_bytes: the most that files of nodes may have together; `None` for no limit but the disk's. The index is
            beside it: some 380 bytes a node.
        min_free_bytes: what stays free on the disk.
    """

    max_bytes: int | None = None
    min_free_bytes: int = 2**30

    def excess(self, num_bytes: int, used: int, free: int) -> int:
        """Return how many bytes must go before so many more fit; none if it is not positive."""
        over_the_floor = num_bytes + self.min_free_bytes - free
        return over_the_floor if self.max_bytes is None else max(over_the_floor, used + num_bytes - self.max_bytes)


def in_order_of_removal(
    tree: Tree, last_use: Callable[[bytes], int], is_in_use: Callable[[bytes], bool]
) -> Iterator[Node]:
    """
    Yield the nodes that may go, in this order: the one used longest ago of those that no other continues any more.

    A node in use stays, and so do those before it.
    """
    num_children = {own_id: len(tree.children(own_id)) for own_id in tree.nodes}
    waiting = [(last_use(own_id), own_id) for own_id, number in num_children.items() if not number]
    heapify(waiting)
    while waiting:
        node = tree.nodes[heappop(waiting)[1]]
        if is_in_use(node.id):
            continue
        yield node
        if node.parent in num_children:
            num_children[node.parent] -= 1
            if not num_children[node.parent]:
                heappush(waiting, (last_use(node.parent), node.parent))
