"""Numba kernels over blocks of keys and values in host memory. They know NumPy and nothing of torch."""

from .blocks import BLOCK, value_width
from .coded_blocks import BITS, CHUNK, RecordLayout
from .coding import NOT_FINITE, decode_blocks, encode_blocks
from .compilation import compile_and_wait, compile_in_background
from .integer_kernels import set_integer_kernels, uses_integer_kernels
from .threads import get_num_threads, set_num_threads
from .workspace import CodedBlocks, Shape, Workspace

__all__ = [
    "BITS",
    "BLOCK",
    "CHUNK",
    "NOT_FINITE",
    "CodedBlocks",
    "RecordLayout",
    "Shape",
    "Workspace",
    "compile_and_wait",
    "compile_in_background",
    "decode_blocks",
    "encode_blocks",
    "get_num_threads",
    "set_integer_kernels",
    "set_num_threads",
    "uses_integer_kernels",
    "value_width",
]
