"""How much host memory is free, and the error that says so before it runs out."""

import weakref
from pathlib import Path

import psutil


class HostMemoryError(MemoryError):
    """Host memory would not suffice. Raised before anything is allocated or changed."""


def available_host_bytes() -> int:
    """Bytes that can be allocated without swapping: what the system reports free, or what a container leaves."""
    free = psutil.virtual_memory().available
    return max(0, min([free, *_cgroup_headrooms()]))


def _cgroup_headrooms(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Bytes left under each memory limit on this process: its control groups (v2 and v1), up to the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    headrooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # v1
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        # Inside a container the path may be the host's; the container's own group is then mounted at the top.
        for folder in [group, *group.parents] if group.is_dir() else [top]:
            if folder.is_relative_to(top):
                headrooms += _headroom(folder, *names)
    return headrooms


def _headroom(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> list[int]:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    if limit == "max":
        return []
    # Page cache counts as usage, but the kernel gives it up before it refuses memory.
    return [int(limit) - usage + int(stat.get(reclaimable_name, 0))]


class HostBudget:
    """
    What the layers of one cache hold in host memory.

    A model's layers grow one after the other to the same length, so the first that grows asks for all of them: a
    context that does not fit is refused before its first layer is stored, not in the middle of the model.

    Args:
        num_stores: number of layers that will hold tokens in host memory.
        entry_tokens: tokens that are counted as one: 64 where what is held are records of coded blocks.
    """

    def __init__(self, num_stores: int, entry_tokens: int = 1):
        self.num_stores = num_stores
        self.entry_tokens = entry_tokens
        self._held: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict) -> "HostBudget":
        """An empty budget: the copies of the layers note themselves in it."""
        return HostBudget(self.num_stores, self.entry_tokens)

    def grow(self, store: object, num_tokens: int, bytes_per_token: int) -> None:
        """
        Note that `store` will hold `num_tokens`, once it is known that all layers could.

        Raises:
            HostMemoryError: they would need more than is free; nothing is noted then.
        """
        held = {other: size for other, size in self._held.items() if other is not store}
        held_tokens, held_bytes_per_token = self._held.get(store, (0, bytes_per_token))
        need = num_tokens * bytes_per_token - held_tokens * held_bytes_per_token
        need += sum(max(0, num_tokens - tokens) * size for tokens, size in held.values())
        need += max(0, self.num_stores - len(held) - 1) * num_tokens * bytes_per_token
        require_host_bytes(need, f"{num_tokens * self.entry_tokens:,} tokens need")
        self.note(store, num_tokens, bytes_per_token)

    def note(self, store: object, num_tokens: int, bytes_per_token: int) -> None:
        """Note what `store` holds, without asking."""
        self._held[store] = (num_tokens, bytes_per_token)


def require_host_bytes(num_bytes: int, purpose: str) -> None:
    """
    Check that `num_bytes` more can be allocated.

    Raises:
        HostMemoryError: they cannot; the message begins with `purpose`, such as "5 tokens need".
    """
    free = available_host_bytes()
    if num_bytes > free:
        raise HostMemoryError(
            f"{purpose} {num_bytes / 2**30:.2f} GiB more host memory and {free / 2**30:.2f} GiB are free. "
            "Use a shorter context, a smaller batch or fewer beams, or free memory first."
        )
