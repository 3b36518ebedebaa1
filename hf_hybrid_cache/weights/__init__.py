"""Weights in host memory: of 8 or 4 bits, and experts of which only those are read that are chosen."""

from .coverage import CODED_DTYPES, Covered, NothingToCodeError, coverage, holds_experts
from .experts_implementation import chosen_experts_if_any
from .host_experts import ExpertsReport, host_experts, move_experts_to_host
from .loading_config import CodedWeightsConfig
from .quantized_weights import WeightsReport, coding_bar, quantize_weights, require_some, weights_in_bits
from .width import WEIGHT_BITS, Width

__all__ = [
    "CODED_DTYPES",
    "WEIGHT_BITS",
    "CodedWeightsConfig",
    "Covered",
    "ExpertsReport",
    "NothingToCodeError",
    "WeightsReport",
    "Width",
    "chosen_experts_if_any",
    "coding_bar",
    "coverage",
    "holds_experts",
    "host_experts",
    "move_experts_to_host",
    "quantize_weights",
    "require_some",
    "weights_in_bits",
]
