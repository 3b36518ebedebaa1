"""Decode steps of a whole model in one call."""

from .fused_decode import FusedDecode, fuse_decode, fuse_where_known, is_fused, repeats_rows, run_together
from .trial import UnknownStepError

__all__ = [
    "FusedDecode",
    "UnknownStepError",
    "fuse_decode",
    "fuse_where_known",
    "is_fused",
    "repeats_rows",
    "run_together",
]
