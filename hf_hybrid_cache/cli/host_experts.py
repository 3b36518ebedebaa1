"""What `--experts host` does with a model that is loaded."""

from rich.console import Console
from transformers import PreTrainedModel

from ..weights import move_experts_to_host
from .console import UsageError, note


def keep_experts_in_host_memory(model: PreTrainedModel, name: str, notes: Console) -> None:
    """
    Let a model compute its experts in host memory, as they are or in the few bits that they were loaded in.

    Raises:
        UsageError: it has none.
    """
    try:
        report = move_experts_to_host(model)
    except ValueError as error:
        raise no_experts(name) from error
    note(notes, f"experts: {report}")


def no_experts(name: str) -> UsageError:
    """To be raised for a model that `--experts` does not apply to."""
    return UsageError(f"{name} has no experts that could be kept in host memory: drop --experts. --weights is for any.")
