"""The machine that a plan is for."""

from dataclasses import dataclass

import torch

from ..scalars import PREFILL_CHUNK_SIZE
from ..storage import available_host_bytes


@dataclass(frozen=True)
class Machine:
    """
    The memory that a plan may use.

    Attributes:
        device_bytes: GPU memory; 0 for no GPU.
        host_bytes: host memory.
    """

    device_bytes: int
    host_bytes: int


def this_machine(device_bytes: int | None = None, host_bytes: int | None = None) -> Machine:
    """
    Describe this machine.

    Args:
        device_bytes: GPU memory that a plan may use; `None` for the memory that is free now.
        host_bytes: host memory that a plan may use; `None` for the memory that is free now.
    """
    device_bytes = _free_device_bytes() if device_bytes is None else device_bytes
    return Machine(device_bytes, available_host_bytes() if host_bytes is None else host_bytes)


def default_chunk(on_gpu: bool) -> int:
    """The default `prefill_chunk_size`: on a GPU few tokens, to save memory; on a CPU the fastest number."""
    return 512 if on_gpu else PREFILL_CHUNK_SIZE


def _free_device_bytes() -> int:
    """Free bytes on the current accelerator, torch's reserve included; 0 without one, or if it does not say."""
    if not torch.accelerator.is_available():
        return 0
    try:
        free, _ = torch.accelerator.get_memory_info()
    except RuntimeError:
        return 0
    return free + torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
