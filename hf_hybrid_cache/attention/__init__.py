"""Attention to keys and values where they are: the kernels called from torch, and handles that take their place."""

from .handles import StaleHandleError, handles_of, observed
from .host_attention import MAX_QUERIES, blocks_of, compile_kernels, has_kernel_for_many, place_of
from .quantized_attention import QuantizedAttention, has_quantized_kernel
from .stored_attention import StoredAttention

__all__ = [
    "MAX_QUERIES",
    "QuantizedAttention",
    "StaleHandleError",
    "StoredAttention",
    "blocks_of",
    "compile_kernels",
    "handles_of",
    "has_kernel_for_many",
    "has_quantized_kernel",
    "observed",
    "place_of",
]
