"""Quantized weights, and experts in host memory of which only the chosen ones are read."""

from .chosen_experts import use_chosen_experts_if_any
from .coverage import (
    QUANTIZED_DTYPES,
    WEIGHT_BITS,
    Covered,
    NothingToQuantizeError,
    Width,
    coverage,
    holds_experts,
    require_some,
)
from .host_experts import move_experts_to_host
from .loading import QUANT_METHOD, QuantizedWeightsConfig
from .quantized_weight import HostWeight, QuantizedWeight, ReadOnlyWeightError
from .quantized_weights import WeightsReport, quantization_bar, quantize_weights

__all__ = [
    "QUANTIZED_DTYPES",
    "QUANT_METHOD",
    "WEIGHT_BITS",
    "Covered",
    "HostWeight",
    "NothingToQuantizeError",
    "QuantizedWeight",
    "QuantizedWeightsConfig",
    "ReadOnlyWeightError",
    "WeightsReport",
    "Width",
    "coverage",
    "holds_experts",
    "move_experts_to_host",
    "quantization_bar",
    "quantize_weights",
    "require_some",
    "use_chosen_experts_if_any",
]
