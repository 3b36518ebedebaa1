"""Where a model runs, and what is compiled for it."""

import time

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..attention import compile_kernels as compile_and_wait
from .console import UsageError, note


def checked_device(name: str | None) -> torch.device | None:
    if name is None:
        return None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = ["cpu"] + (
        [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())] if accelerator else []
    )
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        device = torch.device("meta")
    wanted = device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
    if wanted not in here:
        raise UsageError(f"--device {name!r} is not here: this machine has {', '.join(here)}.")
    return device


def compile_kernels(model: PreTrainedModel, is_coded: bool, notes: Console) -> None:
    """Compile the kernels that attend to caches of a model on the CPU, so that it is not timed as part of an answer."""
    if model.device.type != "cpu":
        return
    start = time.perf_counter()
    has_waited = []

    def on_wait() -> None:
        has_waited.append(True)
        note(notes, "compiling kernels, once on this machine")

    compile_and_wait(model.dtype, is_coded, on_wait)
    if has_waited:
        note(notes, f"compiled in {time.perf_counter() - start:.0f} s")
