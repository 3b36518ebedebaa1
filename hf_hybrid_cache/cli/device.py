"""A model, loaded where it is to run, and what is compiled for it."""

import time

import torch
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..attention import compile_kernels as compile_and_wait
from ..models import Loaded, load
from .console import UsageError, note


def loaded(name: str, dtype: torch.dtype | None, device: str | None, weight_bits: int | None, notes: Console) -> Loaded:
    """
    The model that `--model` names, with its tokenizer, on the device that `--device` names.

    Raises:
        UsageError: the device is not here, or cannot compute with weights of `weight_bits`.
        ModelLoadError: the model cannot be had.
    """
    if not notes.is_interactive:
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
    chosen_device = _checked_device(device)
    if weight_bits is not None:
        _require_cpu(chosen_device, weight_bits)
    note(notes, f"loading {name}")
    return load(name, dtype, chosen_device)


def _checked_device(name: str | None) -> torch.device | None:
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


def _require_cpu(chosen: torch.device | None, weight_bits: int) -> None:
    """Refuse `--weights` before a model is loaded onto an accelerator."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = chosen or accelerator
    if device is not None and device.type != "cpu":
        raise UsageError(
            f"--weights {weight_bits} is for a model on the CPU, and this one would be on {device}: pass --device cpu. "
            f"In Python, custom_generate=decode_on_cpu.configure(weights={weight_bits}) reads the prompt on "
            f"{device.type} and decodes on the CPU."
        )


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
