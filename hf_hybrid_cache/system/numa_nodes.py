"""NUMA nodes, mostly one for each socket: binding a process to one, or taking memory of all of them in turn."""

import ctypes
import os
import platform
import re
import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import HybridCacheError
from ..scalars import as_integer, ranges_text

NODES = Path("/sys/devices/system/node")
# Numbers of the system call, for which the C library has no function.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237}
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class NodeError(HybridCacheError, ValueError):
    """A process cannot be bound to a NUMA node; the message says which nodes there are."""


class _Node(NamedTuple):
    """The numbers of a node's processors, of which a node of memory alone has none, and the size of its memory."""

    processors: frozenset[int]
    memory_bytes: int


def bind_to_node(node: int | Literal["all"]) -> None:
    """
    Let this process run on the processors of a NUMA node, mostly a socket, and prefer its memory.

    It concerns the calling thread, and the threads that it starts from now on: call it before torch and NumPy are
    imported, which count processors and start threads. Processors that the process may not use stay out. When the
    memory of the node is full, memory comes from other nodes. A warning says so where the system refuses to choose the
    memory, or where torch was imported before and has more threads than there are processors.

    Args:
        node: its number in the system, from 0. `"all"`: keep all processors, and take memory of all nodes in turn, page
            by page; threads on all nodes then read with the bandwidths of all memories together.

    Raises:
        NodeError: there is no such node, none of its processors may be used, or this system does not bind processes.

    Example:
        >>> from hf_hybrid_cache import bind_to_node
        >>> bind_to_node(0)
        >>> import torch
    """
    nodes = _nodes()
    if node == "all":
        numbers = [number for number, each in nodes.items() if each.memory_bytes]
        if not numbers:
            raise NodeError(f"There are no nodes to take memory of in turn: {NODES} tells of none.")
        _take_memory(_MPOL_INTERLEAVE, numbers, f"Memory is not spread over nodes {ranges_text(numbers)}")
        return
    number = as_integer(node)
    if number is None:
        raise NodeError(f'node must be the number of a NUMA node, or "all", got {node!r}.')
    if not hasattr(os, "sched_setaffinity"):
        raise NodeError(f"Processes are bound to nodes on Linux only, and this is {platform.system()}.")
    there = f"this system has {', '.join(map(_described, nodes.items()))}" if nodes else f"{NODES} tells of none"
    if number not in nodes:
        raise NodeError(f"There is no node {number}: {there}.")
    allowed = os.sched_getaffinity(0)
    processors = nodes[number].processors & allowed
    if not processors:
        raise NodeError(
            f"This process may use processors {ranges_text(allowed)}, as its container or taskset has it, and none of "
            f"them is in node {number}: {there}."
        )
    try:
        os.sched_setaffinity(0, processors)
    except OSError as error:
        raise NodeError(f"The system does not let this process be bound to a node ({error.strerror}).") from error
    threads = getattr(sys.modules.get("torch"), "get_num_threads", int)()
    if threads > len(processors):
        warnings.warn(
            f"torch was imported before and has {threads} threads for {len(processors)} processors: call bind_to_node "
            f"first, or torch.set_num_threads({len(processors)}).",
            stacklevel=2,
        )
    _take_memory(_MPOL_PREFERRED, [number], f"The processors of node {number} are used, its memory is not preferred")


def _nodes() -> dict[int, _Node]:
    """Return all nodes by number, in order; none where the system does not describe them."""
    nodes = {}
    for path in NODES.glob("node*"):
        if re.fullmatch(r"node\d+", path.name):
            try:
                processors, memory = ((path / name).read_text() for name in ("cpulist", "meminfo"))
            except OSError:  # a container may hide it
                continue
            total = re.search(r"MemTotal:\s*(\d+) kB", memory)
            node = _Node(_numbers(processors), 1024 * int(total[1]) if total else 0)
            nodes[int(path.name.removeprefix("node"))] = node
    return dict(sorted(nodes.items()))


def _described(item: tuple[int, _Node]) -> str:
    """Describe a node in a few words."""
    number, node = item
    processors = f"processors {ranges_text(node.processors)}" if node.processors else "no processors"
    return f"node {number} ({processors}, {node.memory_bytes / 2**30:.1f} GiB)"


def _numbers(text: str) -> frozenset[int]:
    """Return the numbers in a text such as `0-3,8`."""
    pairs = (part.split("-") for part in text.strip().split(",") if part)
    return frozenset(number for pair in pairs for number in range(int(pair[0]), int(pair[-1]) + 1))


def _take_memory(policy: int, numbers: Collection[int], failure: str) -> None:
    """Set the memory policy of this thread to some nodes, or warn that it failed."""
    call = _SET_MEMPOLICY.get(platform.machine()) if sys.platform == "linux" else None
    if call is None:
        reason = f"how to ask for it on {platform.machine()} is not known"
    else:
        mask = (ctypes.c_ulong * (max(numbers) // _WORD_BITS + 1))()
        for number in numbers:
            mask[number // _WORD_BITS] |= 1 << number % _WORD_BITS
        library = ctypes.CDLL(None, use_errno=True)
        # The system reads one bit less than the number says.
        if not library.syscall(call, policy, mask, ctypes.c_ulong(_WORD_BITS * len(mask) + 1)):
            return
        reason = f"the system refuses ({os.strerror(ctypes.get_errno())})"
    warnings.warn(f"{failure}: {reason}.", stacklevel=3)
