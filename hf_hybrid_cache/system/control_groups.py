"""The control groups of this process, by which Linux limits the resources of containers and jobs."""

from pathlib import Path
from typing import NamedTuple

# Where they are mounted, and the file that names those of this process.
CONTROL_GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class ControlGroup(NamedTuple):
    """
    A control group, which limits a resource.

    Attributes:
        folder: of its files.
        version: 1 or 2, by which the files have other names.
    """

    folder: Path
    version: int


def control_groups(controller: str, root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> list[ControlGroup]:
    """
    List this process' groups of a controller such as "memory", up to the root; empty on other systems.

    Args:
        controller: as Linux calls it.
        root: see `CONTROL_GROUPS`.
        membership: see `MEMBERSHIP`.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, version = root, 2
        elif controller in controllers.split(","):
            top, version = root / controller, 1
        else:
            continue
        group = top / path.lstrip("/")
        # Inside a container the path may be the host's; the container's own group is then mounted at the top.
        for folder in [group, *group.parents] if group.is_dir() else [top]:
            if folder.is_relative_to(top):
                groups.append(ControlGroup(folder, version))
    return groups
