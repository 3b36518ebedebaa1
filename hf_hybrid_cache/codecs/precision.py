"""Keeping the arithmetic of codecs in the dtypes that are written, whatever a model is run in."""

from contextlib import AbstractContextManager, nullcontext

import torch


def as_written(device: torch.device) -> AbstractContextManager[object]:
    """Keep products on `device` in float32 where their factors are: `torch.autocast` would round these."""
    # Leaving it takes a tenth of a millisecond, and not every device has it.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
