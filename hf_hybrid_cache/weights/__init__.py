"""Weights of 8 or 4 bits for models that compute on the CPU."""

from .coverage import CODED_DTYPES, Covered, coverage, holds_experts
from .quantized_weights import WeightsReport, coding_bar, quantize_weights, require_some, weights_in_bits
from .width import WEIGHT_BITS, Width

__all__ = [
    "CODED_DTYPES",
    "WEIGHT_BITS",
    "Covered",
    "WeightsReport",
    "Width",
    "coding_bar",
    "coverage",
    "holds_experts",
    "quantize_weights",
    "require_some",
    "weights_in_bits",
]
