"""One layer of a cache, which joins storage, codecs and attention as its placement says."""

from .errors import DeviceMemoryError, IncompleteCacheError, NoCheckpointError
from .hybrid_layer import HybridLayer, checked_removal
from .layer_stores import LayerStores
from .options import LEAST_DEVICE_TOKENS, Placement, checked_count
from .stock_layers import copy_of, follow, forget_states_of, move_tensors_of, num_sequences_of, tensors_of
from .window_layer import WindowLayer, stock_form, window_of

__all__ = [
    "LEAST_DEVICE_TOKENS",
    "DeviceMemoryError",
    "HybridLayer",
    "IncompleteCacheError",
    "LayerStores",
    "NoCheckpointError",
    "Placement",
    "WindowLayer",
    "checked_count",
    "checked_removal",
    "copy_of",
    "follow",
    "forget_states_of",
    "move_tensors_of",
    "num_sequences_of",
    "stock_form",
    "tensors_of",
    "window_of",
]
