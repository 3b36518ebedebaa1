"""The smallest kernel, which shows whether Triton runs any."""

import torch
import triton
import triton.language as tl

from .placing import on_device


@triton.jit
def _add_one(numbers):
    tl.store(numbers, tl.load(numbers) + 1)


def run_probe(device: torch.device) -> None:
    """
    Run a kernel.

    Raises:
        Exception: whatever Triton raises where it cannot, or a RuntimeError.
    """
    number = torch.zeros(1, dtype=torch.int32, device=device)
    with on_device(device):
        _add_one[(1,)](number)
    if number.item() != 1:
        raise RuntimeError("a kernel that adds one did not.")
