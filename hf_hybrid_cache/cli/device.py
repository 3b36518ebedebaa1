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
    if weights.weights is not None or weights.experts is not None:
        _require_cpu(chosen_device, weights)
    note(notes, f"loading {name}")
    report = None
    if weights.bits is None or name in CREATED_MODELS:
        model, tokenizer = load(name, dtype, chosen_device)
        if weights.weights is not None:
            report = code_weights(model, weights.weights, notes)
    else:
        (model, tokenizer), report = load_coded(name, weights, notes, dtype=dtype, device_map=chosen_device)
    if weights.experts is not None:
        keep_experts_in_host_memory(model, name)
    return LoadedModel(model, tokenizer, None if report is None else weights_said(report, weights.only_experts))


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


def _require_cpu(chosen: torch.device | None, weights: WeightOptions) -> None:
    """Refuse `--weights` and `--experts` before a model is loaded onto an accelerator."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = chosen or accelerator
    if device is None or device.type == "cpu":
        return
    option = f"--experts {weights.experts}" if weights.weights is None else f"--weights {weights.weights}"
    refusal = f"{option} is for a model on the CPU, and this one would be on {device}: pass --device cpu."
    if weights.weights is not None:
        refusal += (
            f" In Python, custom_generate=decode_on_cpu.configure(weights={weights.weights}) reads the prompt on "
            f"{device.type} and decodes on the CPU."
        )
    raise UsageError(refusal)


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
