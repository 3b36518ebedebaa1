"""One layer of a cache, which joins storage, codecs and attention as its placement says."""

from .errors import DeviceMemoryError, IncompleteCacheError
from .hybrid_layer import HybridLayer
from .layer_stores import MOST_HELD_BYTES, LayerStores
from .placement import LEAST_DEVICE_TOKENS, Placement, checked_count
from .selection import Selection
from .stock_layers import (
    batch_of,
    follow,
    forget_states_of,
    move_tensors_of,
    repeat_sequences_of,
    tensors_of,
)

__all__ = [
    "LEAST_DEVICE_TOKENS",
    "MOST_HELD_BYTES",
    "DeviceMemoryError",
    "HybridLayer",
    "IncompleteCacheError",
    "LayerStores",
    "Placement",
    "Selection",
    "batch_of",
    "checked_count",
    "follow",
    "forget_states_of",
    "move_tensors_of",
    "repeat_sequences_of",
    "tensors_of",
]
