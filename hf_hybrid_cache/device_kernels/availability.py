"""Finding out where Triton can run kernels."""

import importlib.util
import os
import warnings
from functools import cache

import torch

# From this capability on, devices of NVIDIA multiply bfloat16.
_LEAST_CAPABILITY = (8, 0)


def runs_on(device: torch.device) -> bool:
    """Whether Triton compiles kernels for `device` here, or interprets them for any (`TRITON_INTERPRET=1`)."""
    if not _is_installed():
        return False
    return is_interpreted() or (device.type == "cuda" and _compiles_for(device))


def is_interpreted() -> bool:
    """Whether Triton was told to interpret kernels, which is for tests, and slow."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _compiles_for(device: torch.device) -> bool:
    """Whether a first kernel runs: Triton needs, besides itself, a compiler of C, and a device that it knows."""
    from .probe import run_probe

    try:
        if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
            return False
        run_probe(device)
    except Exception as error:  # any error of torch, Triton, the C compiler or the driver
        lines = str(error).splitlines() or [type(error).__name__]
        warnings.warn(
            f"Triton is installed, but runs no kernel on {device}: {lines[0]} Quantized keys and values are dequantized"
            " for each use instead, which is right and slower.",
            stacklevel=2,
        )
        return False
    return True
