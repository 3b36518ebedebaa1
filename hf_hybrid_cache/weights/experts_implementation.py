"""Switching a model to this package's implementation of experts, through transformers' `ExpertsInterface`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .chosen_experts import chosen_experts
from .expert_layers import expert_modules

# The name under which transformers knows `chosen_experts`.
IMPLEMENTATION = "hf_hybrid_cache"


def use_chosen_experts(model: PreTrainedModel) -> dict[str, str | None]:
    """
    Let a model compute its experts with `chosen_experts` from now on.

    Returns:
        The implementations before, as `model.set_experts_implementation` takes them.

    Raises:
        ValueError: the model has no experts that `chosen_experts` can compute.
    """
    experts = require_experts(model)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, chosen_experts)
    before: dict[str, str | None] = model.get_experts_implementation()
    model.set_experts_implementation(IMPLEMENTATION)
    others = {type(each).__name__ for each in experts.values() if each.config._experts_implementation != IMPLEMENTATION}
    if others:
        model.set_experts_implementation(before)
        raise ValueError(
            f"transformers lets nobody choose how {' and '.join(sorted(others))} of {type(model).__name__} compute: "
            "set_experts_implementation has no effect on them."
        )
    return before


@contextmanager
def chosen_experts_used(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute its experts with `chosen_experts` until the block ends."""
    before = use_chosen_experts(model)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextmanager
def chosen_experts_if_any(model: PreTrainedModel) -> Iterator[None]:
    """Like `chosen_experts_used`, but leave a model without such experts as it is."""
    before = use_chosen_experts_if_any(model)
    try:
        yield
    finally:
        if before is not None:
            model.set_experts_implementation(before)


def use_chosen_experts_if_any(model: PreTrainedModel) -> dict[str, str | None] | None:
    """Like `use_chosen_experts`, but return `None` for a model without such experts, and leave it as it is."""
    try:
        return use_chosen_experts(model)
    except ValueError:
        return None


def require_experts(model: PreTrainedModel) -> dict[str, Any]:
    """
    The modules of a model that hold stacked experts, by name.

    Raises:
        ValueError: there is none; the message names experts of another form.
    """
    experts = expert_modules(model)
    if not experts:
        kinds = sorted({type(module).__name__ for module in model.modules() if _looks_like_experts(module)})
        reason = f"{' and '.join(kinds)} are not declared as experts to transformers" if kinds else "it is dense"
        raise ValueError(f"{type(model).__name__} has no experts that could be computed on their own: {reason}.")
    return experts


def _looks_like_experts(module: Any) -> bool:
    return "expert" in type(module).__name__.lower()
