"""The loop and the arguments that transformers' `generate` does not pass to a callable for `custom_generate`."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GENERATION_MODES_MAPPING


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
