"""What `--experts host` does with a model that is loaded."""

from transformers import PreTrainedModel

from ..weights import has_stacked_experts
from .console import UsageError


def keep_experts_in_host_memory(model: PreTrainedModel, name: str) -> None:
    """
    Let a model compute its experts in host memory, as they are or in the few bits that they were loaded in.

    Raises:
        UsageError: it has none.
    """
    if not has_stacked_experts(model):
        raise no_experts(name)
    # The one place for a call of move_experts_to_host. A model on the CPU, the only one that `loaded` lets through,
    # has its experts in host memory without it.


def no_experts(name: str) -> UsageError:
    """To be raised for a model that `--experts` does not apply to."""
    return UsageError(f"{name} has no experts that could be kept in host memory: drop --experts. --weights is for any.")
