"""Kernels for the device of the model, in Triton. They know torch, and the form of quantized blocks."""

from .availability import runs_on
from .splits import LONGEST_HEAD, Codes, Splits, attend_in_splits, merged

__all__ = ["LONGEST_HEAD", "Codes", "Splits", "attend_in_splits", "merged", "runs_on"]
