"""KV caches for Hugging Face transformers that keep long contexts in host memory."""

from ._version import __version__
from .cache import DynamicHybridCache, HybridCache, MemoryReport, OffloadedHybridCache
from .decode import DecodeOnCPU, decode_on_cpu
from .handles import StaleHandleError
from .kernels import get_num_threads, set_num_threads
from .placement import Placement
from .storage import CacheStats, HostMemoryError

__all__ = [
    "CacheStats",
    "DecodeOnCPU",
    "DynamicHybridCache",
    "HostMemoryError",
    "HybridCache",
    "MemoryReport",
    "OffloadedHybridCache",
    "Placement",
    "StaleHandleError",
    "__version__",
    "decode_on_cpu",
    "get_num_threads",
    "set_num_threads",
]
