"""Rotary embeddings that depend on the length of the text."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_LONGROPE = "longrope"


def longest_text(model: PreTrainedModel) -> int | None:
    """
    Return up to how many tokens of a text states depend on the tokens before them alone; `None` for any number.

    A forward pass with a later position uses the long factors of longrope, for all of its tokens.
    """
    configs: list[Any] = [module.config for module in model.modules() if is_longrope(module)]
    return min((int(each.rope_parameters["original_max_position_embeddings"]) for each in configs), default=None)


def is_longrope(module: nn.Module) -> bool:
    """Return whether a module has one of two sets of frequencies by the length of the text, as transformers does it."""
    return vars(module).get("rope_type") == _LONGROPE and type(module).__module__.startswith("transformers.")


def unknown_by_length(modules: Iterable[nn.Module]) -> list[str]:
    """List the kinds of rotary embeddings whose states depend on the length in a way that has no limit here."""
    found: set[str] = set()
    for module in modules:
        kind = vars(module).get("rope_type")
        names = kind.values() if isinstance(kind, dict) else [] if is_longrope(module) else [kind]
        found.update(name for name in names if isinstance(name, str) and ("dynamic" in name or name == _LONGROPE))
    return sorted(found)
