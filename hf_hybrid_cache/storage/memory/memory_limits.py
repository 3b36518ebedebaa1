"""Limits of the host memory of this process: the system's, a container's, and the process's own."""

import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from ...control_groups import CONTROL_GROUPS, MEMBERSHIP, control_groups

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
