"""What `--weights` does: a loaded model's weights in few bits, for good."""

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..weights import WeightsReport, quantize_weights
from .console import UsageError, note


def code_weights(model: PreTrainedModel, bits: int, notes: Console) -> WeightsReport:
    """
    Let a model on the CPU compute with weights of so many bits.

    Raises:
        UsageError: none of its weights can be.
    """
    try:
        report = quantize_weights(model, bits)
    except ValueError as error:
        raise UsageError(str(error)) from error
    note(notes, f"weights: {report}")
    # The first product compiles its kernel, which is not to be timed as part of an answer.
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    return report


def weights_said(report: WeightsReport) -> str:
    """How many bits, and what the weights take in all, for the end of a line."""
    return f"weights {(report.coded_bytes + report.other_bytes) / 2**20:,.1f} MiB in {report.bits} bits"
