"""A model, loaded where it is to run, and what is compiled for it."""

import time
from dataclasses import dataclass

import torch
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..attention import compile_kernels as compile_and_wait
from ..models import CREATED_MODELS, load
from .coded_weights import code_weights, load_coded, weights_said
from .console import UsageError, note
from .host_experts import keep_experts_in_host_memory
from .weight_options import WeightOptions


@dataclass(frozen=True)
class LoadedModel:
    """
    What answers.

    Attributes:
        model: on its device.
        tokenizer: `None` for a model without one.
        weights_said: what its weights take, if some are of few bits.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    weights_said: str | None


def loaded(
    name: str, dtype: torch.dtype | None, device: str | None, weights: WeightOptions, notes: Console
) -> LoadedModel:
    """
    The model that `--model` names, with its tokenizer, on the device that `--device` names.

    Raises:
        UsageError: the device is not here, or the model or the device cannot have such weights.
        ModelLoadError: the model cannot be had.
    """
    if not notes.is_interactive:
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
    chosen_device = _checked_device(device)
    if weights.weights is not None:
        _require_cpu(chosen_device, weights.weights)
    # Experts are never to be on the device, where they may not fit.
    loaded_on = chosen_device if weights.experts is None else torch.device("cpu")
    note(notes, f"loading {name}")
    report = None
    if weights.bits is None or name in CREATED_MODELS:
        model, tokenizer = load(name, dtype, loaded_on)
        if weights.weights is not None:
            report = code_weights(model, weights.weights, notes)
    else:
        (model, tokenizer), report = load_coded(name, weights, notes, dtype=dtype, device_map=loaded_on)
    if weights.experts is not None:
        keep_experts_in_host_memory(model, name, notes)
        model.to(chosen_device or _accelerator() or "cpu")  # type: ignore[arg-type]
    return LoadedModel(model, tokenizer, None if report is None else weights_said(report, weights.only_experts))


def _checked_device(name: str | None) -> torch.device | None:
    if name is None:
        return None
    accelerator = _accelerator()
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


def _require_cpu(chosen: torch.device | None, bits: int) -> None:
    """Refuse `--weights` before a model is loaded onto an accelerator."""
    device = chosen or _accelerator()
    if device is None or device.type == "cpu":
        return
    raise UsageError(
        f"--weights {bits} is for a model on the CPU, and this one would be on {device}: pass --device cpu. In Python, "
        f"custom_generate=decode_on_cpu.configure(weights={bits}) reads the prompt on {device.type} and decodes on "
        "the CPU."
    )


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


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
