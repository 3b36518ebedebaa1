"""
Reading from the frames of functions that call a cache what they do not pass to it, such as the prompt.

A cache is asked how long it is, and never what for. Where a function is not as it is here, nothing is read.
"""

import sys
from types import FrameType
from typing import Any, NamedTuple

import torch

from ... import graph_breaks

# The package of the caches, in which this room is.
_CACHES = (__package__ or "").rpartition(".")[0]
# Modules whose frames stand between a cache and its caller: decorators, and a cache that holds this one.
_BETWEEN = (f"{_CACHES}.", graph_breaks.__name__, "torch.", "functools", "transformers.cache_utils")

# The functions of `generate` in which a prompt is computed.
_STEPS = ("_prefill", "_assisted_decoding")


class WholePrompt(NamedTuple):
    """
    A prompt that `generate` is about to compute, with its tokens that are stored already.

    Attributes:
        length: in tokens.
        token_ids: `[sequences, tokens]`; `None` where embeddings were passed.
        mask: likewise, 0 where nothing attends; `None` for none.
    """

    length: int
    token_ids: torch.Tensor | None
    mask: torch.Tensor | None


def whole_prompt(step: str) -> WholePrompt | None:
    """
    Return the whole prompt that `step`, a function of `generate`, is about to compute.

    `None` where something else asks, or only the new tokens were given.
    """
    frame = _caller()
    if frame is None or frame.f_code.co_name != step:
        return None
    found = frame.f_locals
    try:
        options, ids = found["model_kwargs"], found["input_ids"]
        if found.get("use_inputs_embeds"):
            return WholePrompt(int(options["inputs_embeds"].shape[1]), None, None)
        mask = options.get("decoder_attention_mask" if found["self"].config.is_encoder_decoder else "attention_mask")
        # A mask of ones is dropped, and its length is kept.
        masked = getattr(found["generation_config"], "_mask_length", None) if mask is None else mask.shape[1]
        return WholePrompt(int(masked), ids, mask) if masked == ids.shape[1] else None
    except (KeyError, AttributeError):
        return None


def counter_from_images() -> torch.nn.Module | None:
    """Return the model that counts positions on from images, if it asks: it keeps the offset, `rope_deltas`, itself."""
    frame = _caller()
    if frame is None or "rope_deltas" not in frame.f_code.co_names:
        return None
    asking = frame.f_locals.get("self")
    return next((each for each in (asking, getattr(asking, "model", None)) if hasattr(each, "rope_deltas")), None)


def is_computing(token_ids: torch.Tensor) -> bool:
    """Whether a function of `generate` that has called the cache, through a model, computes this very prompt."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _STEPS and frame.f_locals.get("input_ids") is token_ids:
            return True
        frame = frame.f_back
    return False


def border_that_drops_the_cache(num_tokens: int) -> int | None:
    """
    Return the number of tokens at which a model stops using this cache, if it is about to do so.

    Models with two forms of rotary embedding, such as Phi-3 with a long context, do so: what they have computed with
    the form for short contexts does not fit the one for long ones.
    """
    frame = _caller()
    if frame is None or "original_max_position_embeddings" not in frame.f_code.co_names:
        return None
    found = frame.f_locals
    try:
        border: Any = found["self"].config.original_max_position_embeddings
        return int(border) if num_tokens <= border < found["input_ids"].shape[1] else None
    except (KeyError, AttributeError, TypeError):
        return None


def _caller() -> FrameType | None:
    """Return the frame of the function that called the cache."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def stack_level() -> int:
    """Return the `stacklevel` of the code that called this package's caches, for a warning of the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_CACHES):
        level, frame = level + 1, frame.f_back
    return level
