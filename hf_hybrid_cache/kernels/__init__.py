"""Numba kernels over keys, values and weights in host memory. They know NumPy and nothing of torch."""

from .attention.stored_blocks import QuantizedBlocks, StoredBlocks
from .attention.workspace import (
    Shape,
    Strided,
    WorkingMemory,
    Workspace,
    attend_many,
    uses_prefill_kernel,
)
from .compilation import (
    compile_and_wait,
    compile_in_background,
    compile_plain_weights_in_background,
    compile_quantized_weights_in_background,
)
from .forms.blocks import (
    NOT_FINITE,
    PackedLayout,
    dequantize_blocks,
    quantize_blocks,
    value_width,
)
from .forms.panels import (
    PANEL_ROWS,
    WEIGHT_BITS,
    PanelLayout,
    dequantize_panels,
    factor_of,
    quantize_panels,
)
from .step.arithmetic import NUM_OPERANDS, REDUCTIONS
from .step.instructions import (
    BFLOAT16,
    FLOAT32,
    Attend,
    Call,
    Instruction,
    Memory,
    Multiply,
    Operation,
    Place,
    ProductOf,
)
from .step.program import Seen, Sequences, StepProgram
from .vector.code_tiles import BITS
from .vector.compiled import KernelsDisabledError
from .vector.parallel import use_threads_here
from .vector.processor import has_fast_bfloat16, has_gemm
from .vector.threads import get_num_threads, set_num_threads
from .vector.vector_ir import BLOCK, CACHE_LINE, LANES
from .weights.experts import ExpertCall, add_up_experts
from .weights.gemm import multiply_many, uses_gemm
from .weights.products import Products

__all__ = [
    "BFLOAT16",
    "BITS",
    "BLOCK",
    "CACHE_LINE",
    "FLOAT32",
    "LANES",
    "NOT_FINITE",
    "NUM_OPERANDS",
    "PANEL_ROWS",
    "REDUCTIONS",
    "WEIGHT_BITS",
    "Attend",
    "Call",
    "ExpertCall",
    "Instruction",
    "KernelsDisabledError",
    "Memory",
    "Multiply",
    "Operation",
    "PackedLayout",
    "PanelLayout",
    "Place",
    "ProductOf",
    "Products",
    "QuantizedBlocks",
    "Seen",
    "Sequences",
    "Shape",
    "StepProgram",
    "StoredBlocks",
    "Strided",
    "WorkingMemory",
    "Workspace",
    "add_up_experts",
    "attend_many",
    "compile_and_wait",
    "compile_in_background",
    "compile_plain_weights_in_background",
    "compile_quantized_weights_in_background",
    "dequantize_blocks",
    "dequantize_panels",
    "factor_of",
    "get_num_threads",
    "has_fast_bfloat16",
    "has_gemm",
    "multiply_many",
    "quantize_blocks",
    "quantize_panels",
    "set_num_threads",
    "use_threads_here",
    "uses_gemm",
    "uses_prefill_kernel",
    "value_width",
]
