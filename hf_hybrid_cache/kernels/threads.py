"""How many threads the kernels use."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numba
from numba.core import config

VARIABLE = "HF_HYBRID_CACHE_NUM_THREADS"
_chosen: int | None = None
# Numba's fallback pool, where there is no OpenMP, ends the process when two threads enter it.
_pool = threading.Lock()


def set_num_threads(num_threads: int | None) -> None:
    """
    Set how many threads attend on the CPU, in the whole process.

    Attention over host memory is bound by memory bandwidth: threads beyond the physical cores of one socket read no
    more, and those of a second socket read across the link between the two.

    Args:
        num_threads: at most as many as the process may use; `None` for the default, which is the environment variable
            `HF_HYBRID_CACHE_NUM_THREADS`, else the physical cores of one socket.

    Raises:
        ValueError: it is not between 1 and the number of threads that Numba has.
    """
    global _chosen
    _chosen = None if num_threads is None else _checked(num_threads, "num_threads")


def get_num_threads() -> int:
    """
    How many threads attend on the CPU.

    Raises:
        ValueError: `HF_HYBRID_CACHE_NUM_THREADS` is not a number of threads that Numba has.
    """
    if _chosen is not None:
        return _chosen
    if VARIABLE in os.environ:
        return _checked(os.environ[VARIABLE], VARIABLE)
    return _default()


@contextmanager
def threads() -> Iterator[int]:
    """Let Numba use as many threads as were chosen, alone."""
    count = get_num_threads()
    with _pool:
        before = numba.get_num_threads()
        numba.set_num_threads(count)
        try:
            yield count
        finally:
            numba.set_num_threads(before)


def _checked(given: object, name: str) -> int:
    most = _most()
    try:
        count = int(given)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        count = 0
    if isinstance(given, float) or not 1 <= count <= most:
        raise ValueError(
            f"{name} must be an integer from 1 to {most}, the threads that Numba has here, got {given!r}. "
            "Set NUMBA_NUM_THREADS before the process starts to have more."
        )
    return count


@cache
def _default() -> int:
    return max(1, min(_cores_of_one_socket(), _most()))


def _cores_of_one_socket(processors: Path = Path("/sys/devices/system/cpu")) -> int:
    """Physical cores, among those this process may use, of the socket that has most of them."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    sockets: dict[str, set[str]] = {}
    for processor in allowed:
        topology = processors / f"cpu{processor}" / "topology"
        try:
            socket, core = ((topology / name).read_text() for name in ("physical_package_id", "core_id"))
        except OSError:  # not Linux: no way to tell sockets and cores apart
            return len(allowed)
        sockets.setdefault(socket, set()).add(core)
    return max(len(cores) for cores in sockets.values())


def _most() -> int:
    return config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
