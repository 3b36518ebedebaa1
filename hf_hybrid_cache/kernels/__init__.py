"""Numba kernels over keys, values and weights in host memory. They know NumPy and nothing of torch."""

from .blocks import BLOCK, value_width
from .coded_blocks import BITS, CHUNK, RecordLayout
from .coding import NOT_FINITE, decode_blocks, encode_blocks
from .compilation import (
    compile_and_wait,
    compile_coded_weights_in_background,
    compile_in_background,
    compile_plain_weights_in_background,
)
from .compiled import KernelsDisabledError
from .experts import ExpertCall
from .gemm import has_gemm, multiply_many, uses_gemm
from .integer_kernels import set_integer_kernels, uses_integer_kernels
from .key_index import encode_index, index_bytes
from .page_workspace import IndexedBlocks
from .panel_products import PanelProducts
from .panels import PANEL_ROWS, WEIGHT_BITS, PanelLayout, decode_panels, decode_row, encode_panels, factor_of
from .parallel import use_threads_here
from .plain_products import PlainWeights, add_up_plain_experts, multiply_plain
from .prefill import Strided, attend_many, uses_prefill_kernel
from .threads import get_num_threads, set_num_threads
from .vector_ir import CACHE_LINE
from .workspace import CodedBlocks, Shape, Workspace

__all__ = [
    "BITS",
    "BLOCK",
    "CACHE_LINE",
    "CHUNK",
    "NOT_FINITE",
    "PANEL_ROWS",
    "WEIGHT_BITS",
    "CodedBlocks",
    "ExpertCall",
    "IndexedBlocks",
    "KernelsDisabledError",
    "PanelLayout",
    "PanelProducts",
    "PlainWeights",
    "RecordLayout",
    "Shape",
    "Strided",
    "Workspace",
    "add_up_plain_experts",
    "attend_many",
    "compile_and_wait",
    "compile_coded_weights_in_background",
    "compile_in_background",
    "compile_plain_weights_in_background",
    "decode_blocks",
    "decode_panels",
    "decode_row",
    "encode_blocks",
    "encode_index",
    "encode_panels",
    "factor_of",
    "get_num_threads",
    "has_gemm",
    "index_bytes",
    "multiply_many",
    "multiply_plain",
    "set_integer_kernels",
    "set_num_threads",
    "use_threads_here",
    "uses_gemm",
    "uses_integer_kernels",
    "uses_prefill_kernel",
    "value_width",
]
