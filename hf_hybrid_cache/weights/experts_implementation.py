"""Which implementation of experts a model uses: transformers' own door to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .chosen_experts import chosen_experts
from .expert_layers import expert_modules

# By which transformers knows ours.
IMPLEMENTATION = "hf_hybrid_cache"


def use_chosen_experts(model: PreTrainedModel) -> dict[str, str | None]:
    """
    Let a model compute its experts by `chosen_experts` from now on.

    Returns:
        What `model.set_experts_implementation` takes to undo it.

    Raises:
        ValueError: the model has no experts that can be computed so.
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
    """The same for a while."""
    before = use_chosen_experts(model)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextmanager
def chosen_experts_if_any(model: PreTrainedModel) -> Iterator[None]:
    """The same; a model whose experts cannot be computed so, or that has none, is left as it is."""
    before = use_chosen_experts_if_any(model)
    try:
        yield
    finally:
        if before is not None:
            model.set_experts_implementation(before)


def use_chosen_experts_if_any(model: PreTrainedModel) -> dict[str, str | None] | None:
    """As `use_chosen_experts`; `None` for a model that is left as it is."""
    try:
        return use_chosen_experts(model)
    except ValueError:
        return None


def require_experts(model: PreTrainedModel) -> dict[str, Any]:
    """
    The modules of a model that hold stacked experts, by name.

    Raises:
        ValueError: it has none; the message names those of another form.
    """
    experts = expert_modules(model)
    if not experts:
        kinds = sorted({type(module).__name__ for module in model.modules() if _looks_like_experts(module)})
        reason = f"{' and '.join(kinds)} are not declared as experts to transformers" if kinds else "it is dense"
        raise ValueError(f"{type(model).__name__} has no experts that could be computed on their own: {reason}.")
    return experts


def _looks_like_experts(module: Any) -> bool:
    return "expert" in type(module).__name__.lower()
