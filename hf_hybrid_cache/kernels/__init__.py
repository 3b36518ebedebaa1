"""Numba kernels over keys, values and weights in host memory. They know NumPy and nothing of torch."""

from .blocks import BLOCK, value_width
from .compilation import (
    compile_and_wait,
    compile_in_background,
    compile_plain_weights_in_background,
    compile_quantized_weights_in_background,
)
from .prefill import Strided, attend_many, uses_prefill_kernel
from .quantized.quantization import NOT_FINITE, dequantize_blocks, quantize_blocks
from .quantized.quantized_blocks import BITS, CHUNK, PackedLayout
from .selection.key_index import index_bytes, quantize_index
from .selection.page_workspace import IndexedBlocks
from .vector.compiled import KernelsDisabledError
from .vector.parallel import use_threads_here
from .vector.processor import has_gemm
from .vector.threads import get_num_threads, set_num_threads
from .vector.vector_ir import CACHE_LINE
from .weights.experts import ExpertCall
from .weights.gemm import multiply_many, uses_gemm
from .weights.panel_products import PanelProducts
from .weights.panels import (
    PANEL_ROWS,
    WEIGHT_BITS,
    PanelLayout,
    dequantize_panels,
    dequantize_row,
    factor_of,
    quantize_panels,
)
from .weights.plain_products import PlainWeights, add_up_plain_experts, multiply_plain
from .workspace import QuantizedBlocks, Query, Shape, Workspace

__all__ = [
    "BITS",
    "BLOCK",
    "CACHE_LINE",
    "CHUNK",
    "NOT_FINITE",
    "PANEL_ROWS",
    "WEIGHT_BITS",
    "ExpertCall",
    "IndexedBlocks",
    "KernelsDisabledError",
    "PackedLayout",
    "PanelLayout",
    "PanelProducts",
    "PlainWeights",
    "QuantizedBlocks",
    "Query",
    "Shape",
    "Strided",
    "Workspace",
    "add_up_plain_experts",
    "attend_many",
    "compile_and_wait",
    "compile_in_background",
    "compile_plain_weights_in_background",
    "compile_quantized_weights_in_background",
    "dequantize_blocks",
    "dequantize_panels",
    "dequantize_row",
    "factor_of",
    "get_num_threads",
    "has_gemm",
    "index_bytes",
    "multiply_many",
    "multiply_plain",
    "quantize_blocks",
    "quantize_index",
    "quantize_panels",
    "set_num_threads",
    "use_threads_here",
    "uses_gemm",
    "uses_prefill_kernel",
    "value_width",
]
