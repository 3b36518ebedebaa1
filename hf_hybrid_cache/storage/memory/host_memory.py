"""Host memory: the limits on this process, the budget of a cache, and the error that comes before memory runs out."""

import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import psutil

from ...errors import HybridCacheError
from ...system.control_groups import CONTROL_GROUPS, MEMBERSHIP, control_groups
from .growth import grown_capacity, least_capacity

if sys.platform == "linux":
    import resource

# Part of a limit on the process that a cache leaves to other allocations of Python and torch.
_SPARE_BYTES = 32 * 2**20
# Names of a limit, of the usage, and of the page cache in it, by the version of control groups.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
# Version 1 has a larger number than this instead of "max".
_NO_LIMIT = 2**62


class HostMemoryError(HybridCacheError, MemoryError):
    """Host memory would not suffice. The error is raised before anything is allocated or changed."""


class Limit(NamedTuple):
    """
    One limit of memory.

    Attributes:
        free: bytes that it leaves.
        where: the end of a sentence that says how much is free.
    """

    free: int
    where: str


def tightest_limit() -> Limit:
    """Return the limit that leaves the least."""
    limits = [Limit(psutil.virtual_memory().available, "")]
    limits += [Limit(free, " within the memory limit of its container (control group)") for free in _cgroup_headrooms()]
    limits += _process_limits()
    limit = min(limits)
    return limit._replace(free=max(0, limit.free))


def available_host_bytes() -> int:
    """Return the bytes that the system, a container and limits on the process let be allocated without swapping."""
    return tightest_limit().free


def address_space_is_limited() -> bool:
    """Return whether unused address space counts against a limit on the process."""
    return bool(_process_limits())


def _process_limits() -> list[Limit]:
    """Return the limits of `ulimit` on Linux; other systems do not enforce theirs."""
    if sys.platform != "linux":
        return []
    names = [
        (resource.RLIMIT_AS, "vms", " within the process's limit of address space (RLIMIT_AS, ulimit -v)"),
        (resource.RLIMIT_DATA, "data", " within the process's limit of data (RLIMIT_DATA, ulimit -d)"),
    ]
    limits = []
    for number, used, where in names:
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY:
            limits.append(Limit(limit - getattr(psutil.Process().memory_info(), used) - _SPARE_BYTES, where))
    return limits


def _cgroup_headrooms(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> list[int]:
    """Return the bytes left under each memory limit on this process."""
    return [
        headroom
        for folder, version in control_groups("memory", root, membership)
        for headroom in _headroom(folder, *_FILES[version])
    ]


def _headroom(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> list[int]:
    try:
        limit = (folder / limit_name).read_text().strip()
        # Most groups have no limit; reading the other files would take half a millisecond.
        if limit == "max" or int(limit) >= _NO_LIMIT:
            return []
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    # Page cache counts as usage, but the kernel gives it up before it refuses memory.
    return [int(limit) - usage + int(stat.get(reclaimable_name, 0))]


class HostBudget:
    """
    Host memory that the layers of one cache hold.

    A model's layers grow one after the other to the same length, so the first that grows asks for all of them: a
    context that does not fit is refused before its first layer is stored, not in the middle of the model. The others
    do not ask again: that would take as long as attention to a short prompt.

    Args:
        num_stores: number of layers that will hold tokens in host memory.
        entry_tokens: tokens of an entry, 64 for packed blocks.
        expected_tokens: that will be stored, if known: the first ones ask for memory for all of them.
    """

    def __init__(self, num_stores: int, entry_tokens: int = 1, expected_tokens: int = 0):
        self.num_stores, self.entry_tokens, self.expected_tokens = num_stores, entry_tokens, expected_tokens
        # Entries, and bytes of an entry, by who holds them.
        self._held: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()
        # The entries that the last layer asked for, the bytes of one, and the entries that it was granted.
        self._asked = 0, 0, 0

    def __deepcopy__(self, memo: dict) -> "HostBudget":
        """Return an empty budget, in which the copies of the layers note themselves."""
        return HostBudget(self.num_stores, self.entry_tokens, self.expected_tokens)

    def grow(self, holder: object, num_entries: int, entry_bytes: int, moved_bytes: int = 0) -> int:
        """
        Check that all layers could hold `num_entries` and some more, and note that `holder` of one layer's will.

        An entry of it takes `entry_bytes`; `moved_bytes` are held twice while its buffers grow.

        Returns:
            Entries that there is memory for: a chunk more than `num_entries`, or only what fills whole blocks.

        Raises:
            HostMemoryError: the layers would need more than is free, or nothing is held yet and the expected length
                would; nothing is noted then.
        """
        asked, asked_bytes, granted = self._asked
        if num_entries == asked and entry_bytes <= asked_bytes and self._held:
            self.note(holder, granted, entry_bytes)
            return granted

        others = [size for other, size in self._held.items() if other is not holder]
        held, held_bytes = self._held.get(holder, (0, 0))
        num_alike = max(1, self.num_stores - len(others))  # with those that hold nothing yet

        def need(entries: int) -> int:
            """Return the bytes that all layers lack to hold so many entries."""
            missing = sum(max(0, entries - there) * size for there, size in others)
            return num_alike * entries * entry_bytes - held * held_bytes + missing + moved_bytes

        limit = tightest_limit()
        free = limit.free
        ahead = grown_capacity(num_entries, self.entry_tokens)
        granted = ahead if need(ahead) <= free else least_capacity(num_entries, self.entry_tokens)
        if need(granted) > free:
            raise _refusal(need(granted), f"{num_entries * self.entry_tokens:,} tokens need", limit)
        expected = need(self.expected_tokens // self.entry_tokens)
        if expected > free and not self._held:
            raise _refusal(expected, f"{self.expected_tokens:,} tokens (max_length) need", limit)
        self.note(holder, granted, entry_bytes)
        self._asked = num_entries, entry_bytes, granted
        return granted

    def granted(self, holder: object) -> int:
        """Return the entries that `holder` holds, or was granted memory for."""
        return self._held.get(holder, (0, 0))[0]

    def note(self, holder: object, num_entries: int, entry_bytes: int) -> None:
        """Note how many entries `holder` holds, without a check."""
        self._held[holder] = (num_entries, entry_bytes)


def require_host_bytes(num_bytes: int, purpose: str) -> None:
    """
    Check that `num_bytes` more can be allocated.

    Raises:
        HostMemoryError: they cannot; the message begins with `purpose`, such as "5 tokens need".
    """
    limit = tightest_limit()
    if num_bytes > limit.free:
        raise _refusal(num_bytes, purpose, limit)


def _refusal(num_bytes: int, purpose: str, limit: Limit) -> HostMemoryError:
    return HostMemoryError(
        f"{purpose} {num_bytes / 2**30:.2f} GiB more host memory and {limit.free / 2**30:.2f} GiB are free"
        f"{limit.where}. Use a shorter context, a smaller batch or fewer beams, or free memory first; "
        "`hf-hybrid-cache plan` tells what fits."
    )
