"""Kernels for the device of the model, in Triton. They know torch, and the form of coded blocks."""

from .availability import runs_on
from .parts import LONGEST_HEAD, Codes, Parts, attend_in_parts, merged

__all__ = ["LONGEST_HEAD", "Codes", "Parts", "attend_in_parts", "merged", "runs_on"]
