"""The caches that `generate` takes."""

from .caches import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache
from .contents.contents import Contents
from .hybrid_cache import HybridCache, MemoryReport, contents_of, fill_from_file
from .same_logits import SameLogits

__all__ = [
    "Contents",
    "DynamicHybridCache",
    "HybridCache",
    "MemoryReport",
    "OffloadedHybridCache",
    "QuantizedHybridCache",
    "SameLogits",
    "contents_of",
    "fill_from_file",
]
