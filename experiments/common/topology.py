"""Caches, sockets and NUMA nodes, as Linux tells them; nothing is known elsewhere."""

import re
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def last_level_cache_bytes() -> int:
    """Return the bytes of all last-level caches together; 0 where the system does not say."""
    sizes: dict[tuple[int, str], int] = {}
    for folder in SYSTEM.glob("cpu/cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, shared, size = ((folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
        except OSError:
            continue
        sizes[int(level), shared] = int(size.removesuffix("K")) * 1024
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def num_sockets() -> int | None:
    packages = {path.read_text().strip() for path in SYSTEM.glob("cpu/cpu[0-9]*/topology/physical_package_id")}
    return len(packages) or None


def num_numa_nodes() -> int | None:
    return sum(bool(re.fullmatch(r"node\d+", path.name)) for path in SYSTEM.glob("node/node*")) or None
