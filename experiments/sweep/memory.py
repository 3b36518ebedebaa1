"""Peaks of memory, and the details of out-of-memory errors."""

import re
from pathlib import Path
from typing import Any

import psutil
import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
# Messages of torch's allocators, of NumPy and of hf_hybrid_cache.
_ASKED = re.compile(
    r"(?:tried to allocate|Tried to allocate|Unable to allocate|tokens need) (?P<size>[\d.]+) (?P<unit>bytes|[KMGTP]iB)"
)
_HOST = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


class PeakMemory:
    """Measures the memory peaks of this process since the object was made."""

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info().rss
        if _CLEAR.exists():
            _CLEAR.write_text("5")  # the highest RSS from now on
            self._before = _highest_rss()  # the same counter: others may differ by some pages for each thread
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def report(self) -> dict[str, int | None]:
        """
        Return the peaks in bytes.

        `host_over_model`: the highest RSS, less that of before; None where the system does not tell it. 0 where all of
            it fitted into what had been given back.
        `device_allocated`, `device_reserved`: by torch's allocator, all of the process; None without a GPU.
        """
        host = None
        if _STATUS.exists():
            host = max(0, _highest_rss() - self._before)  # threads count some pages late
        has_gpu = torch.cuda.is_available()
        return {
            "host_over_model": host,
            "device_allocated": torch.cuda.max_memory_allocated() if has_gpu else None,
            "device_reserved": torch.cuda.max_memory_reserved() if has_gpu else None,
        }


def _highest_rss() -> int:
    return int(_STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024


def out_of_memory(error: BaseException) -> dict[str, Any] | None:
    """Return the kind of memory that was short and the bytes asked for; `None` for other errors."""
    message = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        where = "device"
    elif isinstance(error, MemoryError) or any(phrase in message for phrase in _HOST):
        where = "host"
    else:
        return None
    asked = _ASKED.search(message)
    return {
        "where": where,
        "bytes_asked": round(float(asked["size"]) * _UNITS[asked["unit"]]) if asked else None,
        "message": message.splitlines()[0] if message else type(error).__name__,
    }
