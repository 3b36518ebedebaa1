"""KV caches for Hugging Face transformers that keep long contexts in host memory."""

from ._version import __version__
from .cache import DynamicHybridCache, HybridCache, MemoryReport, OffloadedHybridCache
from .placement import Placement
from .storage import HostMemoryError, TransferStats

__all__ = [
    "DynamicHybridCache",
    "HostMemoryError",
    "HybridCache",
    "MemoryReport",
    "OffloadedHybridCache",
    "Placement",
    "TransferStats",
    "__version__",
]
