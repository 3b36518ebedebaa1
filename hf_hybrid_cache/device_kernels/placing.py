"""Which device a kernel is launched on."""

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Let kernels be launched on `device`, and on the stream that is current there: Triton asks for none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
