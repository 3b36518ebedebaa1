"""One layer of a cache, which joins storage, codecs and attention as its placement says."""

from .errors import DeviceMemoryError, IncompleteCacheError, NoCheckpointError
from .hybrid_layer import HybridLayer, checked_removal
from .layer_cost import HOST, LayerCost, layer_bytes
from .layer_stores import MOST_HELD_BYTES, LayerStores
from .placement import LEAST_DEVICE_TOKENS, Placement, checked_count
from .selection import Selection
from .stock_layers import (
    batch_of,
    can_be_cropped,
    copy_of,
    follow,
    forget_states_of,
    move_tensors_of,
    num_sequences_of,
    put_back,
    repeat_sequences_of,
    select_sequences_of,
    tensors_of,
)

__all__ = [
    "HOST",
    "LEAST_DEVICE_TOKENS",
    "MOST_HELD_BYTES",
    "DeviceMemoryError",
    "HybridLayer",
    "IncompleteCacheError",
    "LayerCost",
    "LayerStores",
    "NoCheckpointError",
    "Placement",
    "Selection",
    "batch_of",
    "can_be_cropped",
    "checked_count",
    "checked_removal",
    "copy_of",
    "follow",
    "forget_states_of",
    "layer_bytes",
    "move_tensors_of",
    "num_sequences_of",
    "put_back",
    "repeat_sequences_of",
    "select_sequences_of",
    "tensors_of",
]
