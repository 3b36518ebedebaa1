"""The number of threads that the kernels use."""

import contextlib
import ctypes
import math
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

from ...scalars import as_integer
from ...system.control_groups import CONTROL_GROUPS, MEMBERSHIP, control_groups

VARIABLE = "HF_HYBRID_CACHE_NUM_THREADS"
# Numbers of the system call `get_mempolicy`, for which the C library has no function.
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236}
# The policies MPOL_INTERLEAVE and MPOL_WEIGHTED_INTERLEAVE.
_SPREAD = (3, 6)
_UNLIMITED = sys.maxsize


class _Number(NamedTuple):
    """A number of threads. One that the user asks for holds whatever number torch has."""

    value: int
    is_asked_for: bool


_number: _Number | None = None


def set_num_threads(num_threads: int | None) -> None:
    """
    Set how many threads attend on the CPU, in the whole process.

    Attention over host memory is bound by memory bandwidth. More threads than one socket has physical cores read no
    faster; threads of a second socket read across the link between the two, unless memory of both is interleaved.

    Args:
        num_threads: at most as many as the process may use; `None` for the default, which is the environment variable
            `HF_HYBRID_CACHE_NUM_THREADS`, else the least of three numbers: torch's threads
            (`torch.get_num_threads()` at each call), the physical cores of one socket (of all sockets if the process
            interleaves memory of several NUMA nodes), and the processors that the container's quota pays for.

    Raises:
        ValueError: `num_threads` is not between 1 and the number of processors that this process may use.
    """
    global _number
    _number = None if num_threads is None else _Number(_checked(num_threads, "num_threads"), is_asked_for=True)


def get_num_threads() -> int:
    """
    The number of threads that attend on the CPU in calls of this thread.

    Other threads may have another number, as torch has. Torch's number counts once torch is imported.

    Raises:
        ValueError: `HF_HYBRID_CACHE_NUM_THREADS` is not such a number.
    """
    return num_threads_beside(threads_of_torch())


def num_threads_beside(of_torch: int) -> int:
    """The number of threads that attend where torch has `of_torch`, see `get_num_threads`."""
    global _number
    if _number is None:
        given = os.environ.get(VARIABLE)
        most = min(_physical_cores(of_all=_is_memory_spread()), _processors_at_a_time())
        _number = _Number(most, is_asked_for=False) if given is None else _Number(_checked(given, VARIABLE), True)
    return _number.value if _number.is_asked_for else min(_number.value, of_torch)


def threads_of_torch() -> int:
    """The number of torch's threads; unlimited if torch is not imported."""
    count = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return _UNLIMITED if count is None else int(count())


def _processors_at_a_time(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> int:
    """The quota of the process's container in processors, rounded up; unlimited without a quota."""
    quotas = [_UNLIMITED]
    for folder, version in control_groups("cpu", root, membership):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError):  # not limited here
            quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            if quota > 0:
                quotas.append(max(1, math.ceil(quota / period)))
    return min(quotas)


def _checked(given: object, name: str) -> int:
    most = len(_processors())
    try:
        count = int(given) if isinstance(given, str) else as_integer(given)
    except ValueError:
        count = None
    if count is None or not 1 <= count <= most:
        raise ValueError(
            f"{name} must be an integer from 1 to {most}, the processors that this process may use, got {given!r}."
        )
    return count


def _is_memory_spread() -> bool:
    """Whether new memory is interleaved over several nodes, as by `numactl --interleave`."""
    call = _GET_MEMPOLICY.get(platform.machine())
    if call is None or sys.platform != "linux":
        return False
    policy = ctypes.c_int()
    refused = ctypes.CDLL(None).syscall(call, ctypes.byref(policy), None, 0, None, 0)
    return not refused and policy.value in _SPREAD


def _physical_cores(of_all: bool, processors: Path = Path("/sys/devices/system/cpu")) -> int:
    """The physical cores that this process may use, of all sockets or of the socket with most of them."""
    allowed = _processors()
    sockets: dict[str, set[str]] = {}
    for processor in allowed:
        topology = processors / f"cpu{processor}" / "topology"
        try:
            socket, core = ((topology / name).read_text() for name in ("physical_package_id", "core_id"))
        except OSError:  # not Linux: sockets and cores are unknown
            return len(allowed)
        sockets.setdefault(socket, set()).add(core)
    return (sum if of_all else max)(len(cores) for cores in sockets.values())


def _processors() -> set[int]:
    """The processors that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0) | _places_of_openmp()


def _places_of_openmp() -> set[int]:
    """The processors to which OpenMP binds its threads (OMP_PROC_BIND). Then this thread may use only one of them."""
    found: set[int] = set()
    with contextlib.suppress(AttributeError, OSError):  # not loaded
        library = ctypes.CDLL(None)
        for place in range(library.omp_get_num_places()):
            processors = (ctypes.c_int * library.omp_get_place_num_procs(place))()
            library.omp_get_place_proc_ids(place, processors)
            found.update(processors)
    return found
