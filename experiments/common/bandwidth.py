"""The read bandwidth of the machine, a limit of everything that reads memory once. Not an experiment of its own."""

import mmap
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from experiments.common.timing import seconds_of
from hf_hybrid_cache import get_num_threads

# Threads that sleep while they wait. Those of OpenMP would spin, against those of torch, for a long while after a sum.
numba.config.THREADING_LAYER = "workqueue"  # type: ignore[attr-defined]
PAGES = {"4 KiB": "MADV_NOHUGEPAGE", "2 MiB": "MADV_HUGEPAGE"}


@numba.njit(parallel=True)
def _sum(words: np.ndarray) -> np.uint64:
    total = np.uint64(0)
    for index in numba.prange(words.size):
        total += words[index]
    return total


def plain_sum(words: np.ndarray) -> None:
    """Read `words` once, with as many threads as the CPU kernels use."""
    threads = numba.get_num_threads()
    numba.set_num_threads(get_num_threads())
    try:
        _sum(words)
    finally:
        numba.set_num_threads(threads)


def mapped_words(num_bytes: int, pages: str) -> np.ndarray:
    """Map and write `num_bytes` of memory, in pages of one of the sizes in `PAGES`."""
    advice = PAGES[pages]
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        mapping.madvise(getattr(mmap, advice))
    words = np.frombuffer(mapping, np.uint64)
    words[:] = 1
    return words


def last_level_cache_bytes() -> int:
    """Return the bytes of all last-level caches together; 0 where the system does not say."""
    sizes: dict[tuple[int, str], int] = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, shared, size = ((folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
        except OSError:
            continue
        sizes[int(level), shared] = int(size.removesuffix("K")) * 1024
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


class MemoryReader:
    """
    Sums up buffers much larger than the caches, one of small pages and one of huge pages; the better one counts.

    Reading also leaves the processor's caches without anything that was in them: whatever is timed next finds its data
    in memory, as a layer does after all the others. A last sum, untimed and by torch, wakes the threads that models and
    kernels run on: on a virtual machine that takes milliseconds, which are not theirs.

    Args:
        buffer_mib: size of either buffer; None means twice the last-level cache, at least 512.
    """

    def __init__(self, buffer_mib: int | None = None):
        num_bytes = buffer_mib * 2**20 if buffer_mib else max(2**29, 2 * last_level_cache_bytes())
        self._buffers = {pages: mapped_words(num_bytes, pages) for pages in PAGES}
        self._last = torch.from_numpy(self._buffers["2 MiB"].view(np.int64))
        self._num_bytes = num_bytes
        self._seconds: dict[str, list[float]]
        self.forget()
        self.read()  # compiles
        self.forget()

    def read(self) -> float:
        """Read both buffers; return bytes a second of the faster one."""
        seconds = {pages: seconds_of(partial(plain_sum, words)) for pages, words in self._buffers.items()}
        for pages, value in seconds.items():
            self._seconds[pages].append(value)
        self._last.sum()
        return self._num_bytes / min(seconds.values())

    def forget(self) -> None:
        """Drop the samples, so that a report is about what is read from now on."""
        self._seconds = {pages: [] for pages in PAGES}

    def report(self) -> dict[str, Any]:
        """Return the reads since `forget`: bytes a second (of the medians, the better one), and raw samples."""
        return {
            "bytes_per_second": self._num_bytes / min(map(statistics.median, self._seconds.values())),
            "buffer_bytes": self._num_bytes,
            "samples_seconds": self._seconds,
        }


def read_bandwidth(reader: MemoryReader) -> float:
    """Measure and print bytes a second, so that the limit is known before anything else is measured."""
    reader.forget()
    for _ in range(5):
        reader.read()
    rate: float = reader.report()["bytes_per_second"]
    print(f"memory is read at {rate / 1e9:.1f} GB/s")
    return rate


def bus_bandwidth() -> float:
    """Return bytes a second of a copy from page-locked host memory to the device, the best of ten."""
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    del device
    torch.cuda.empty_cache()  # not to be found in a peak
    return host.nbytes / min(seconds)
