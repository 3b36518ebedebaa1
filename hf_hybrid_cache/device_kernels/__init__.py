"""Kernels for the device of the model, in Triton. They know torch, and the form of quantized blocks."""

from .splits import LONGEST_HEAD, Codes, Splits, attend_in_splits, merged, runs_on

__all__ = ["LONGEST_HEAD", "Codes", "Splits", "attend_in_splits", "merged", "runs_on"]
