"""Numba kernels over blocks of keys and values in host memory. They know NumPy and nothing of torch."""

from .blocks import BLOCK, value_width
from .compilation import compile_in_background
from .threads import get_num_threads, set_num_threads
from .workspace import Shape, Workspace

__all__ = [
    "BLOCK",
    "Shape",
    "Workspace",
    "compile_in_background",
    "get_num_threads",
    "set_num_threads",
    "value_width",
]
