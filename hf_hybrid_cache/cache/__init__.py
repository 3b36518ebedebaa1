"""The caches that `generate` takes."""

from .caches import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache, SameLogits
from .checkpoints import kinds_that_stay
from .contents import Contents, MemoryReport
from .files import fill_from_file
from .hybrid_cache import HybridCache, contents_of
from .whole_step import WholeSteps, border_of_angles, is_unaltered

__all__ = [
    "Contents",
    "DynamicHybridCache",
    "HybridCache",
    "MemoryReport",
    "OffloadedHybridCache",
    "QuantizedHybridCache",
    "SameLogits",
    "WholeSteps",
    "border_of_angles",
    "contents_of",
    "fill_from_file",
    "is_unaltered",
    "kinds_that_stay",
]
