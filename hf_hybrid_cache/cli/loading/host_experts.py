"""Moving the experts of a loaded model to host memory, as `--experts host` says."""

from rich.console import Console
from transformers import PreTrainedModel

from ...weights import move_experts_to_host
from ..console import UsageError, note


def keep_experts_in_host_memory(model: PreTrainedModel, name: str, notes: Console) -> None:
    """
    Move the experts of a model to host memory, where the CPU computes them.

    Raises:
        UsageError: the model has no experts.
    """
    try:
        report = move_experts_to_host(model)
    except ValueError as error:
        raise no_experts(name) from error
    note(notes, f"experts: {report}")


def no_experts(name: str) -> UsageError:
    """The error for a model to which `--experts` does not apply."""
    return UsageError(f"{name} has no experts that could be kept in host memory: drop --experts. --weights is for any.")
