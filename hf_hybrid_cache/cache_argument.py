"""The name of the argument that takes a cache: `cache` since transformers 5.24, `past_key_values` before."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

# The name that the installed version uses for arguments and outputs.
CACHE_ARGUMENT = "cache" if "cache" in {each.name for each in fields(BaseModelOutputWithPast)} else "past_key_values"
# All that a caller may use: the newer versions take the older names, too.
_NAMES = ("cache", "past_key_values", "cache_params")


def cache_argument(cache: Any) -> dict[str, Any]:
    """
    A cache under the name that the installed transformers wants.

    Example:
        >>> model.generate(**inputs, **cache_argument(cache), max_new_tokens=200)
    """
    return {CACHE_ARGUMENT: cache}


def passed_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments of a model or of `generate`, under whichever name; `None` if there is none."""
    return next((arguments[name] for name in _NAMES if arguments.get(name) is not None), None)


def require_use_cache(arguments: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if `generate`, which has a cache to fill, would compute all tokens again in each step."""
    if not arguments.get("use_cache", True):
        raise ValueError(
            f"There is a cache to fill, and use_cache={arguments['use_cache']} forbids it: generate would compute, and "
            "store, all tokens again in each step. It is an argument of the call, or of the model's "
            "generation_config. Pass use_cache=True to generate, or no cache and no custom_generate."
        )
