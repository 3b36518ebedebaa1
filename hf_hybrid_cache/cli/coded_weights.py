"""What `--weights` and `--expert-bits` do: weights in few bits, for good."""

from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..models import Loaded, ModelLoadError, load
from ..weights import CodedWeightsConfig, NothingToCodeError, WeightsReport, quantize_weights
from .console import UsageError, note
from .host_experts import no_experts
from .weight_options import WeightOptions


def load_coded(name: str, options: WeightOptions, notes: Console, **where: Any) -> tuple[Loaded, WeightsReport]:
    """
    A model and its tokenizer, its weights coded one by one while they are read.

    Args:
        name: of a model that comes from files.
        options: with bits of all weights or of experts.
        notes: where it is said what was coded.
        where: `dtype` and `device_map` of `models.load`.

    Raises:
        UsageError: none of the weights that are asked for can be coded.
        ModelLoadError: the model cannot be had.
    """
    assert options.bits is not None
    config = CodedWeightsConfig(options.bits, only_experts=options.only_experts)
    try:
        loaded = load(name, **where, quantization_config=config)
    except ModelLoadError as error:
        if not isinstance(error.__cause__, NothingToCodeError):
            raise
        raise (no_experts(name) if options.only_experts else UsageError(str(error.__cause__))) from error
    model: Any = loaded[0]
    report: WeightsReport = model.hf_quantizer.report
    _say(model, report, notes)
    return loaded, report


def code_weights(model: PreTrainedModel, bits: int, notes: Console) -> WeightsReport:
    """
    Let a model on the CPU, which is loaded as it is, compute with weights of so many bits.

    Raises:
        UsageError: none of its weights can be.
    """
    try:
        report = quantize_weights(model, bits)
    except ValueError as error:
        raise UsageError(str(error)) from error
    _say(model, report, notes)
    return report


def weights_said(report: WeightsReport, only_experts: bool = False) -> str:
    """How many bits, and what the weights take in all, for the end of a line."""
    size = f"weights {(report.coded_bytes + report.other_bytes) / 2**20:,.1f} MiB"
    return f"{size}, experts in {report.bits} bits" if only_experts else f"{size} in {report.bits} bits"


def _say(model: PreTrainedModel, report: WeightsReport, notes: Console) -> None:
    note(notes, f"weights: {report}")
    # The first product compiles its kernel, which is not to be timed as part of an answer.
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)
