"""Quantizing the weights of a model, as `--weights` and `--expert-bits` say."""

from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ...models import ModelLoadError, load
from ...models.source import Loaded
from ...weights import NothingToQuantizeError, QuantizedWeightsConfig, WeightsReport, quantize_weights
from ..console import UsageError, note
from .host_experts import no_experts
from .model_options import ModelOptions


def load_quantized(options: ModelOptions, device: torch.device | None, notes: Console) -> tuple[Loaded, WeightsReport]:
    """
    Load a model from files, with its tokenizer, and quantize each weight when it is read.

    Args:
        options: name the model, and the bits of all weights or of experts.
        device: holds the model; `None` for the default one.
        notes: receives a remark on what was quantized.

    Raises:
        UsageError: none of the weights that the options name can be quantized.
        ModelLoadError: the model cannot be loaded.
    """
    assert options.quantized_bits is not None
    config = QuantizedWeightsConfig(options.quantized_bits, only_experts=options.only_experts)
    try:
        loaded = load(options.name, options.torch_dtype, device, quantization_config=config)
    except ModelLoadError as error:
        if not isinstance(error.__cause__, NothingToQuantizeError):
            raise
        raise (no_experts(options.name) if options.only_experts else UsageError(str(error.__cause__))) from error
    model: Any = loaded[0]
    report: WeightsReport = model.hf_quantizer.report
    _say(model, report, notes)
    return loaded, report


def quantize_loaded(model: PreTrainedModel, bits: int, notes: Console) -> WeightsReport:
    """
    Quantize the weights of a loaded model on the CPU to that many bits.

    Raises:
        UsageError: none of its weights can be quantized.
    """
    try:
        report = quantize_weights(model, bits)
    except ValueError as error:
        raise UsageError(str(error)) from error
    _say(model, report, notes)
    return report


def weights_text(report: WeightsReport, only_experts: bool = False) -> str:
    """The bytes of all weights and the bits of the quantized ones, for the end of a remark."""
    size = f"weights {(report.quantized_bytes + report.other_bytes) / 2**20:,.1f} MiB"
    return f"{size}, experts in {report.bits} bits" if only_experts else f"{size} in {report.bits} bits"


def _say(model: PreTrainedModel, report: WeightsReport, notes: Console) -> None:
    note(notes, f"weights: {report}")
    # The first product compiles its kernel, which is not to be timed as part of an answer.
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)
