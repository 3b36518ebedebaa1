"""The end of an answer, and the reason for it."""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedModel

FinishReason = Literal["stop", "length", "context"]


def finish_reason(model: PreTrainedModel, tokens: Sequence[int], max_new_tokens: int, room: int) -> FinishReason:
    """
    The reason why an answer ended.

    Args:
        model: generated the answer.
        tokens: of the answer.
        max_new_tokens: tokens that the answer could have at most.
        room: tokens that fitted into the context after the prompt.

    Returns:
        "stop" after an end-of-text token, "length" after `max_new_tokens`, "context" where the context was full before.
    """
    if tokens and is_end(model, tokens[-1]):
        return "stop"
    if len(tokens) >= max_new_tokens:
        return "length"
    return "context" if len(tokens) >= room else "stop"


def until_end(model: PreTrainedModel, tokens: Sequence[int]) -> list[int]:
    """The tokens of an answer up to its first end-of-text token; padding follows where other answers are longer."""
    end = next((index for index, token in enumerate(tokens, 1) if is_end(model, token)), len(tokens))
    return list(tokens[:end])


def is_end(model: PreTrainedModel, token: int) -> bool:
    """Whether a token is an end-of-text token of the model."""
    settings = model.generation_config
    given = None if settings is None else settings.eos_token_id
    return token in ([] if given is None else [given] if isinstance(given, int) else given)
