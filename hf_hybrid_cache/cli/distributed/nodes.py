"""NUMA nodes, mostly one for each socket: binding a process to one, or taking memory of all of them in turn."""

import ctypes
import os
import platform
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ...errors import HybridCacheError

NODES = Path("/sys/devices/system/node")
# Numbers of the system call, for which the C library has no function.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237}
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class NodeError(HybridCacheError, ValueError):
    """A process cannot be bound to a node; the message says which nodes there are."""


@dataclass(frozen=True)
class Node:
    """
    One NUMA node.

    Attributes:
        number: its number in the system.
        processors: numbers of its processors; empty for a node of memory alone.
        memory_bytes: bytes of its memory, free or not.
    """

    number: int
    processors: frozenset[int]
    memory_bytes: int

    def __str__(self) -> str:
        processors = f"processors {ranges(self.processors)}" if self.processors else "no processors"
        return f"node {self.number} ({processors}, {self.memory_bytes / 2**30:.1f} GiB)"


def bind_to_node(number: int, folder: Path = NODES) -> str | None:
    """
    Let this thread, and the threads that it starts from now on, run on the processors of a node and prefer its memory.

    Processors that the process may not use stay out. Import libraries that count processors afterwards. When the memory
    of the node is full, memory comes from other nodes.

    Args:
        number: the node.
        folder: describes the nodes of the system.

    Returns:
        Why memory is not preferred, in one sentence, if the system refuses that.

    Raises:
        NodeError: there is no such node, none of its processors may be used, or this system does not bind processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise NodeError(f"Processes are bound to nodes on Linux only, and this is {platform.system()}.")
    nodes = nodes_in(folder)
    listed = ", ".join(map(str, nodes.values()))
    if number not in nodes:
        there = f"this system has {listed}" if nodes else f"{folder} tells of none"
        raise NodeError(f"There is no node {number}: {there}.")
    node, allowed = nodes[number], os.sched_getaffinity(0)
    if not node.processors & allowed:
        raise NodeError(
            f"This process may use processors {ranges(allowed)}, as its container or taskset has it, and none of them "
            f"is in node {number}: this system has {listed}."
        )
    try:
        os.sched_setaffinity(0, node.processors & allowed)
    except OSError as error:
        raise NodeError(f"The system does not let this process be bound to a node ({error.strerror}).") from error
    reason = _take_memory(_MPOL_PREFERRED, [number], f"Memory of node {number} is not preferred")
    return None if reason is None else f"{reason} Its processors are used."


def spread_over_nodes(folder: Path = NODES) -> str | None:
    """
    Let this thread, and the threads that it starts from now on, take memory of all nodes in turn, page by page.

    Threads on all nodes then read with the bandwidths of all memories together. The process keeps its processors.

    Args:
        folder: describes the nodes of the system.

    Returns:
        Why memory is not spread, in one sentence, if the system refuses that.

    Raises:
        NodeError: no node has memory.
    """
    numbers = [number for number, node in nodes_in(folder).items() if node.memory_bytes]
    if not numbers:
        raise NodeError(f"There are no nodes to spread memory over: {folder} tells of none.")
    return _take_memory(_MPOL_INTERLEAVE, numbers, f"Memory is not spread over nodes {ranges(numbers)}")


def nodes_in(folder: Path) -> dict[int, Node]:
    """All nodes by number, in order; none where the system does not describe them."""
    nodes = {}
    for path in folder.glob("node*"):
        if re.fullmatch(r"node\d+", path.name):
            number = int(path.name.removeprefix("node"))
            try:
                processors, memory = ((path / name).read_text() for name in ("cpulist", "meminfo"))
            except OSError:  # a container may hide it
                continue
            total = re.search(r"MemTotal:\s*(\d+) kB", memory)
            nodes[number] = Node(number, numbers_in(processors), 1024 * int(total[1]) if total else 0)
    return dict(sorted(nodes.items()))


def numbers_in(text: str) -> frozenset[int]:
    """The numbers in a text such as `0-3,8`."""
    pairs = (part.split("-") for part in text.strip().split(",") if part)
    return frozenset(number for pair in pairs for number in range(int(pair[0]), int(pair[-1]) + 1))


def ranges(numbers: Collection[int]) -> str:
    """The text, such as `0-3,8`, of numbers."""
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    return ",".join(
        f"{first}-{last}" if first < last else f"{first}" for first, last in zip(firsts, lasts, strict=True)
    )


def _take_memory(policy: int, numbers: Collection[int], failure: str) -> str | None:
    """Set the memory policy of this thread to some nodes; returns a sentence that says why it failed, or `None`."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        return f"{failure}: how to ask for it on {platform.machine()} is not known."
    mask = (ctypes.c_ulong * (max(numbers) // _WORD_BITS + 1))()
    for number in numbers:
        mask[number // _WORD_BITS] |= 1 << number % _WORD_BITS
    library = ctypes.CDLL(None, use_errno=True)
    # The system reads one bit less than the number says.
    refused = library.syscall(call, policy, mask, ctypes.c_ulong(_WORD_BITS * len(mask) + 1))
    return f"{failure}: the system refuses ({os.strerror(ctypes.get_errno())})." if refused else None
