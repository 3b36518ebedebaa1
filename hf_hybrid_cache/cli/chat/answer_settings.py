"""The settings of answers that `/set` changes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from ..console import UsageError


@dataclass
class AnswerSettings:
    """
    The settings of the next answers in a conversation.

    Attributes:
        max_new_tokens: tokens of an answer at most.
        temperature: of sampling; 0 takes the likeliest token each time.
    """

    max_new_tokens: int
    temperature: float

    def set(self, name: str, value: str) -> None:
        """
        Parse and change one setting.

        Args:
            name: of the setting.
            value: as it was typed.

        Raises:
            UsageError: there is no such setting, or it cannot have this value.
        """
        if name not in _PARSED:
            raise UsageError(f"There is no setting {name!r}: {', '.join(_PARSED)} can be set.")
        setattr(self, name, _PARSED[name](value))

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


def _max_new_tokens(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"max_new_tokens must be a whole number from 1 on, got {text!r}.")
    return number


def _temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"temperature must be a number from 0 on, got {text!r}.")
    return number


_PARSED: dict[str, Callable[[str], int | float]] = {"max_new_tokens": _max_new_tokens, "temperature": _temperature}
