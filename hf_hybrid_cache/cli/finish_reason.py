"""Why an answer ended."""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedModel

FinishReason = Literal["stop", "length", "context"]


def finish_reason(model: PreTrainedModel, tokens: Sequence[int], max_new_tokens: int, room: int) -> FinishReason:
    """
    Why a model wrote no more.

    Args:
        model: that wrote.
        tokens: that it wrote.
        max_new_tokens: those that were asked for at most.
        room: tokens that its context had left.

    Returns:
        "stop" where the model ended by itself, "length" after `max_new_tokens`, "context" where the context was full
        before.
    """
    if tokens and is_end(model, tokens[-1]):
        return "stop"
    if len(tokens) >= max_new_tokens:
        return "length"
    return "context" if len(tokens) >= room else "stop"


def is_end(model: PreTrainedModel, token: int) -> bool:
    """Whether it is one with which the model ends an answer itself."""
    settings = model.generation_config
    given = None if settings is None else settings.eos_token_id
    return token in ([] if given is None else [given] if isinstance(given, int) else given)
