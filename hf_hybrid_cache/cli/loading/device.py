"""Loading a model onto its device, and compiling the kernels that it needs."""

import time
from dataclasses import dataclass

import torch
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ...attention import compile_kernels as compile_and_wait
from ...models import load
from ...models.loading import CREATED_MODELS
from ..console import UsageError, note
from .host_experts import keep_experts_in_host_memory
from .model_options import ModelOptions
from .quantized_weights import load_quantized, quantize_loaded, weights_text


@dataclass(frozen=True)
class LoadedModel:
    """
    A model that is ready to answer.

    Attributes:
        model: on its device.
        tokenizer: `None` for a model without one.
        weights_text: the bytes of its weights, for a remark; `None` where no weights are quantized.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    weights_text: str | None


def load_model(options: ModelOptions, notes: Console) -> LoadedModel:
    """
    Load a model and its tokenizer as the options say.

    Raises:
        UsageError: the machine lacks the device, or the model or the device cannot have such weights.
        ModelLoadError: the model cannot be loaded.
    """
    if notes.quiet or not notes.is_interactive:
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
    chosen_device = _checked_device(options.device)
    if options.weights is not None:
        _require_cpu(chosen_device, options.weights)
    # Experts are never to be on the device, where they may not fit.
    loaded_on = chosen_device if options.experts is None else torch.device("cpu")
    note(notes, f"loading {options.name}")
    report = None
    if options.quantized_bits is None or options.name in CREATED_MODELS:
        model, tokenizer = load(options.name, options.torch_dtype, loaded_on)
        if options.weights is not None:
            report = quantize_loaded(model, options.weights, notes)
    else:
        (model, tokenizer), report = load_quantized(options, loaded_on, notes)
    if options.experts is not None:
        keep_experts_in_host_memory(model, options.name, notes)
        model.to(chosen_device or _accelerator() or "cpu")  # type: ignore[arg-type]
    return LoadedModel(model, tokenizer, None if report is None else weights_text(report, options.only_experts))


def _checked_device(name: str | None) -> torch.device | None:
    """The device of that name; `None` for the default one."""
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
    """Raise an error if a model with quantized weights would be on an accelerator."""
    device = chosen or _accelerator()
    if device is None or device.type == "cpu":
        return
    raise UsageError(
        f"--weights {bits} is for a model on the CPU, and this one would be on {device}: pass --device cpu. In Python, "
        f"custom_generate=DecodeOnCPU(weights={bits}) reads the prompt on {device.type} and decodes on "
        "the CPU."
    )


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def compile_kernels(model: PreTrainedModel, is_quantized: bool, notes: Console) -> None:
    """Compile the attention kernels of a model on the CPU, so that no answer's time includes it."""
    if model.device.type != "cpu":
        return
    start = time.perf_counter()
    has_waited = []

    def on_wait() -> None:
        has_waited.append(True)
        note(notes, "compiling kernels, once on this machine")

    compile_and_wait(model.dtype, is_quantized, on_wait)
    if has_waited:
        note(notes, f"compiled in {time.perf_counter() - start:.0f} s")
