"""Loading a model as the options say, and compiling the kernels that it needs."""

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..attention import compile_kernels
from ..chat import not_followed, sampling
from ..decode_step import UnknownStepError, fuse_decode
from ..kernels.vector.kernel_files import is_said
from ..models import load
from ..models.loading import is_quantized_when_read
from ..models.shapes import CREATED_MODEL
from ..weights import (
    NothingToQuantizeError,
    QuantizedWeightsConfig,
    WeightsReport,
    move_experts_to_host,
    quantize_weights,
)
from .console import UsageError, note

if TYPE_CHECKING:
    from .options import Model


@dataclass(frozen=True)
class LoadedModel:
    """
    A model that is ready to answer.

    Attributes:
        model: on its device.
        tokenizer: of the model.
        weights_text: the bytes of its weights, for a remark; `None` where no weights are quantized.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights_text: str | None


def load_model(options: "Model", cache: str, notes: Console) -> LoadedModel:
    """
    Load a model and its tokenizer as the options say, and compile the kernels that the cache of this name needs.

    Raises:
        UsageError: the machine lacks the device, or the model or the device cannot have such weights.
        NothingToQuantizeError: the model has none that can be quantized.
        ModelLoadError: the model cannot be loaded.
    """
    if options.name == CREATED_MODEL:
        raise UsageError(f"{CREATED_MODEL} has no tokenizer, so it is for Python only: name another --model.")
    if notes.quiet or not notes.is_interactive:
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
    device = _chosen_device(options.device)
    if options.weights is not None and options.experts is None and device.type != "cpu":
        raise UsageError(
            f"--weights {options.weights} is for a model on the CPU, and this one would be on {device}: pass --device "
            f"cpu. In Python, custom_generate=DecodeOnCPU(weights={options.weights}) reads the prompt on {device.type} "
            "and decodes on the CPU."
        )
    note(notes, f"loading {options.name}")
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    # Experts are never to be on the device, where they may not fit.
    loaded_on = device if options.experts is None else torch.device("cpu")
    bits, report = options.weights, None
    if bits is None or not is_quantized_when_read(options.name):
        if bits is not None and options.experts is not None:
            raise UsageError("--experts with --weights is not for a GGUF file: drop one of them.")
        model, tokenizer = load(options.name, dtype, loaded_on)
        if bits is not None:
            report = quantize_loaded(model, bits, notes)
    else:
        config = QuantizedWeightsConfig(bits, only_experts=options.experts is not None)
        try:
            model, tokenizer = load(options.name, dtype, loaded_on, config)
        except NothingToQuantizeError as error:
            if options.experts is None:
                raise
            raise _no_experts(options.name) from error
        quantizer: Any = model.hf_quantizer
        report = quantizer.report
        _tell(model, report, notes)
    if options.experts is not None:
        try:
            note(notes, f"experts: {move_experts_to_host(model)}")
        except ValueError as error:
            raise _no_experts(options.name) from error
        model.to(device)  # type: ignore[arg-type]
    if wished := sampling(model.generation_config):
        named = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in wished.items())
        note(notes, f"the model's makers sample with {named}; answers follow the options alone")
    if left_out := not_followed(model.generation_config):
        named = ", ".join(f"{name} {value}" for name, value in left_out.items())
        note(notes, f"answers do not follow what the model's generation config says of {named}")
    assert tokenizer is not None
    if cache != "stock":
        _compile_kernels(model, cache == "quantized", notes)
    if report is None:
        return LoadedModel(model, tokenizer, None)
    size, what = report.quantized_bytes + report.other_bytes, "" if options.experts is None else ", experts"
    return LoadedModel(model, tokenizer, f"weights {size / 2**20:,.1f} MiB{what} in {report.bits} bits")


def quantize_loaded(model: PreTrainedModel, bits: int, notes: Console) -> WeightsReport:
    """
    Quantize the weights of a loaded model on the CPU.

    Args:
        model: is changed.
        bits: of a weight.
        notes: receives a remark on what was quantized.

    Raises:
        NothingToQuantizeError: none of its weights can be quantized.
    """
    report = quantize_weights(model, bits)
    _tell(model, report, notes)
    return report


def _compile_kernels(model: PreTrainedModel, is_quantized: bool, notes: Console) -> None:
    """Compile kernels, so that no answer's time includes it, and let decode steps on the CPU use them."""
    if model.device.type != "cpu":
        return
    start, has_waited = time.perf_counter(), []
    was_said = is_said.is_set()  # by the kernels of weights

    def on_wait() -> None:
        has_waited.append(True)
        if not was_said:
            note(notes, "compiling kernels, once on this machine")

    compile_kernels(model.dtype, is_quantized, on_wait)
    with contextlib.suppress(UnknownStepError):
        fuse_decode(model)
    if has_waited:
        note(notes, f"compiled in {time.perf_counter() - start:.0f} s")


def _chosen_device(name: str | None) -> torch.device:
    """The device of that name, by default an accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return accelerator or torch.device("cpu")
    here = ["cpu"]
    if accelerator is not None:
        here += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    if name not in here and f"{name}:0" not in here:
        raise UsageError(f"--device {name!r} is not here: this machine has {', '.join(here)}.")
    return torch.device(name)


def _no_experts(name: str) -> UsageError:
    return UsageError(f"{name} has no experts that could be kept in host memory: drop --experts. --weights is for any.")


def _tell(model: PreTrainedModel, report: WeightsReport, notes: Console) -> None:
    """Say what was quantized, and compile products: the first one is not to be timed as part of an answer."""
    note(notes, f"weights: {report}")
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)
