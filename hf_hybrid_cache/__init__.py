"""KV caches for Hugging Face transformers that keep long contexts in host memory."""

from ._version import __version__
from .cache import HybridCache, MemoryReport
from .caches import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache
from .codecs import minmax, quanto
from .decode import DecodeOnCPU, decode_on_cpu
from .handles import StaleHandleError
from .kernels import get_num_threads, set_integer_kernels, set_num_threads, uses_integer_kernels
from .layer import DeviceMemoryError, IncompleteCacheError
from .placement import Placement
from .saving import CacheFileError, saved_token_ids
from .storage import CacheStats, HostMemoryError, KVCodec

__all__ = [
    "CacheFileError",
    "CacheStats",
    "DecodeOnCPU",
    "DeviceMemoryError",
    "DynamicHybridCache",
    "HostMemoryError",
    "HybridCache",
    "IncompleteCacheError",
    "KVCodec",
    "MemoryReport",
    "OffloadedHybridCache",
    "Placement",
    "QuantizedHybridCache",
    "StaleHandleError",
    "__version__",
    "decode_on_cpu",
    "get_num_threads",
    "minmax",
    "quanto",
    "saved_token_ids",
    "set_integer_kernels",
    "set_num_threads",
    "uses_integer_kernels",
]
