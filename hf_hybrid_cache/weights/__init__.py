"""Weights of 8 or 4 bits for models that compute on the CPU."""

from .coverage import CODED_DTYPES, Covered, NothingToCodeError, coverage, has_stacked_experts
from .loading_config import CodedWeightsConfig
from .quantized_weights import WeightsReport, coding_bar, quantize_weights, require_some, weights_in_bits
from .width import WEIGHT_BITS, Width

__all__ = [
    "CODED_DTYPES",
    "WEIGHT_BITS",
    "CodedWeightsConfig",
    "Covered",
    "NothingToCodeError",
    "WeightsReport",
    "Width",
    "coding_bar",
    "coverage",
    "has_stacked_experts",
    "quantize_weights",
    "require_some",
    "weights_in_bits",
]
