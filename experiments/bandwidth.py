"""The read bandwidth of the machine, the ceiling of whatever has to read memory once. Not an experiment of its own."""

import mmap
import statistics
from functools import partial
from typing import Any

import numba
import numpy as np

from experiments.timing import seconds_of
from experiments.topology import last_level_cache_bytes
from hf_hybrid_cache import get_num_threads

PAGES = {"4 KiB": "MADV_NOHUGEPAGE", "2 MiB": "MADV_HUGEPAGE"}


@numba.njit(parallel=True)
def _sum(words: np.ndarray) -> np.uint64:
    total = np.uint64(0)
    for index in numba.prange(words.size):
        total += words[index]
    return total


def _mapped_words(num_bytes: int, advice: str) -> np.ndarray:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        mapping.madvise(getattr(mmap, advice))
    words = np.frombuffer(mapping, np.uint64)
    words[:] = 1
    return words


class MemoryReader:
    """
    Sums up buffers much larger than the caches, one of small pages and one of huge pages; the better one counts.

    Reading also leaves the processor's caches without anything that was in them: whatever is timed next finds its data
    in memory, as a layer of a model does after all the other layers. It leaves the threads awake, of the OpenMP that
    Numba, torch and llama.cpp share: threads that fell asleep take milliseconds to come back on a virtual machine.

    Args:
        buffer_mib: size of either buffer; None means twice the last-level cache, at least 512.
    """

    def __init__(self, buffer_mib: int | None = None):
        num_bytes = buffer_mib * 2**20 if buffer_mib else max(2**29, 2 * last_level_cache_bytes())
        self._buffers = {pages: _mapped_words(num_bytes, advice) for pages, advice in PAGES.items()}
        self._num_bytes = num_bytes
        self._seconds: dict[str, list[float]]
        self.forget()
        self.read()  # compiles
        self.forget()

    def read(self) -> float:
        """Read both buffers, with the threads that the CPU kernels use; bytes a second of the faster one."""
        threads = numba.get_num_threads()
        numba.set_num_threads(get_num_threads())
        try:
            seconds = {pages: seconds_of(partial(_sum, words)) for pages, words in self._buffers.items()}
        finally:
            numba.set_num_threads(threads)
        for pages, value in seconds.items():
            self._seconds[pages].append(value)
        return self._num_bytes / min(seconds.values())

    def forget(self) -> None:
        """Drop the samples, so that a report is about what is read from now on."""
        self._seconds = {pages: [] for pages in PAGES}

    def report(self) -> dict[str, Any]:
        """What was read since `forget`: bytes a second (of the medians, the better one), and raw samples."""
        return {
            "bytes_per_second": self._num_bytes / min(map(statistics.median, self._seconds.values())),
            "buffer_bytes": self._num_bytes,
            "samples_seconds": self._seconds,
        }


def read_bandwidth(reader: MemoryReader, repeats: int = 5) -> float:
    """Bytes a second, printed: to say what can be reached before anything is measured."""
    reader.forget()
    for _ in range(repeats):
        reader.read()
    rate: float = reader.report()["bytes_per_second"]
    print(f"memory is read at {rate / 1e9:.1f} GB/s")
    return rate
