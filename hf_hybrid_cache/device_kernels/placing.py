"""Launching kernels on the device of their tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch kernels on `device`, and on its current stream, inside the block: Triton asks for neither."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
