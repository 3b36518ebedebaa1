"""The arguments of transformers' `generate`: what takes a cache, and what is not passed to a `custom_generate`."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.modeling_outputs import BaseModelOutputWithPast

# The name that the installed version uses for arguments and outputs: `cache` since 5.24.
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


def arguments_kept_back() -> dict[str, Any]:
    """
    Return the arguments that `generate`, if it has called this package, does not pass on.

    transformers (5.17 to 5.24) drops them for a callable without saying so: a reader of the streamer would wait
    forever.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(f"{__package__}."):
        frame = frame.f_back
    if frame.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        return {}
    return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}


def loop_of(
    model: Any, config: GenerationConfig, streamer: Any = None, assistant_model: PreTrainedModel | None = None
) -> Callable[..., Any]:
    """
    Return the decoding loop of a model's class for the generation mode.

    Raises:
        ValueError: transformers has no such loop, or the loop does not take the streamer or the assistant.
    """
    mode = config.get_generation_mode(assistant_model)
    name = GENERATION_MODES_MAPPING[mode]
    if not hasattr(type(model), name):
        raise ValueError(
            f"{mode} is not part of transformers any more ({name}). Choose another mode, or leave out custom_generate."
        )
    given = {"streamer": streamer, "assistant_model": assistant_model}
    # `generate` has checked only the arguments that it does not keep back.
    model._validate_generation_mode(mode, config, {key: value for key, value in given.items() if value is not None})
    return getattr(type(model), name)
