"""Quantized weights, and experts in host memory of which only the chosen ones are read."""

from .coverage import QUANTIZED_DTYPES, Covered, NothingToQuantizeError, coverage, holds_experts
from .experts_implementation import chosen_experts_if_any
from .host_experts import move_experts_to_host
from .host_weight import HostWeight
from .loading_quantizer import QUANT_METHOD, QuantizedWeightsConfig
from .quantized_weight import QuantizedWeight
from .quantized_weights import quantization_bar, quantize_weights, require_some
from .report import WeightsReport
from .width import WEIGHT_BITS, Width

__all__ = [
    "QUANTIZED_DTYPES",
    "QUANT_METHOD",
    "WEIGHT_BITS",
    "Covered",
    "HostWeight",
    "NothingToQuantizeError",
    "QuantizedWeight",
    "QuantizedWeightsConfig",
    "WeightsReport",
    "Width",
    "chosen_experts_if_any",
    "coverage",
    "holds_experts",
    "move_experts_to_host",
    "quantization_bar",
    "quantize_weights",
    "require_some",
]
