"""Attention to keys and values where they are: the kernels called from torch, and handles that take their place."""

from .code_attention import CodeAttention, has_code_kernel
from .graph_breaks import outside_of_graphs
from .handles import StaleHandleError, handles_of
from .host_kernel import compile_kernels
from .key_index import KeyIndex
from .layer_selection import LayerSelection
from .observed_keys import observed
from .stored_attention import StoredAttention

__all__ = [
    "CodeAttention",
    "KeyIndex",
    "LayerSelection",
    "StaleHandleError",
    "StoredAttention",
    "compile_kernels",
    "handles_of",
    "has_code_kernel",
    "observed",
    "outside_of_graphs",
]
