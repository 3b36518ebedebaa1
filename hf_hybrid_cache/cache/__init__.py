"""The caches that `generate` takes."""

from .caches import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache
from .hybrid_cache import HybridCache, MemoryReport
from .same_logits import SameLogits

__all__ = [
    "DynamicHybridCache",
    "HybridCache",
    "MemoryReport",
    "OffloadedHybridCache",
    "QuantizedHybridCache",
    "SameLogits",
]
