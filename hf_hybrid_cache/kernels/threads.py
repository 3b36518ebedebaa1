"""How many threads the kernels use."""

import contextlib
import ctypes
import os
from pathlib import Path

VARIABLE = "HF_HYBRID_CACHE_NUM_THREADS"
_num_threads: int | None = None


def set_num_threads(num_threads: int | None) -> None:
    """
    Set how many threads attend on the CPU, in the whole process.

    Attention over host memory is bound by memory bandwidth: threads beyond the physical cores of one socket read no
    more, and those of a second socket read across the link between the two.

    Args:
        num_threads: at most as many as the process may use; `None` for the default, which is the environment variable
            `HF_HYBRID_CACHE_NUM_THREADS`, else the physical cores of one socket.

    Raises:
        ValueError: it is not between 1 and the number of processors that this process may use.
    """
    global _num_threads
    _num_threads = None if num_threads is None else _checked(num_threads, "num_threads")


def get_num_threads() -> int:
    """
    How many threads attend on the CPU.

    Raises:
        ValueError: `HF_HYBRID_CACHE_NUM_THREADS` is not such a number.
    """
    global _num_threads
    if _num_threads is None:
        given = os.environ.get(VARIABLE)
        _num_threads = _cores_of_one_socket() if given is None else _checked(given, VARIABLE)
    return _num_threads


def _checked(given: object, name: str) -> int:
    most = len(_processors())
    try:
        count = int(given)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        count = 0
    if isinstance(given, float) or not 1 <= count <= most:
        raise ValueError(
            f"{name} must be an integer from 1 to {most}, the processors that this process may use, got {given!r}."
        )
    return count


def _cores_of_one_socket(processors: Path = Path("/sys/devices/system/cpu")) -> int:
    """Physical cores, among those this process may use, of the socket that has most of them."""
    allowed = _processors()
    sockets: dict[str, set[str]] = {}
    for processor in allowed:
        topology = processors / f"cpu{processor}" / "topology"
        try:
            socket, core = ((topology / name).read_text() for name in ("physical_package_id", "core_id"))
        except OSError:  # not Linux: no way to tell sockets and cores apart
            return len(allowed)
        sockets.setdefault(socket, set()).add(core)
    return max(len(cores) for cores in sockets.values())


def _processors() -> set[int]:
    """Those that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0) | _places_of_openmp()


def _places_of_openmp() -> set[int]:
    """Where OpenMP runs its threads if it binds each to a place (OMP_PROC_BIND); this one has one place only then."""
    found: set[int] = set()
    with contextlib.suppress(AttributeError, OSError):  # not loaded
        library = ctypes.CDLL(None)
        for place in range(library.omp_get_num_places()):
            processors = (ctypes.c_int * library.omp_get_place_num_procs(place))()
            library.omp_get_place_proc_ids(place, processors)
            found.update(processors)
    return found
