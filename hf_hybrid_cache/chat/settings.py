"""The settings of answers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..drafts import MOST_TOKENS, checked_drafts
from ..errors import HybridCacheError
from .forms import FORMS, Form, checked_form

# Bits of keys and values in a quantized cache.
DEFAULT_BITS = 4
# Names that chat templates have for whether a model thinks.
SWITCHES = ("enable_thinking", "thinking")
# Of what logits are divided by or multiplied with: they stay finite.
LEAST_TEMPERATURE = _LEAST = 1e-10
_MOST = 1e10
# The least and the largest value of each number beside the temperature, which may be 0, too.
_RANGES: Mapping[str, tuple[float, float]] = {
    "max_new_tokens": (1, math.inf),
    "max_thinking_tokens": (0, math.inf),
    "top_p": (_LEAST, 1),
    "top_k": (1, math.inf),
    "min_p": (0, 1),
    "repetition_penalty": (_LEAST, _MOST),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, 2**64 - 1),
}


class SettingError(HybridCacheError, ValueError):
    """A setting of answers is out of its range, unsupported, or would be ignored; the message begins with its name."""


@dataclass(frozen=True)
class AnswerSettings:
    """
    Settings of an answer: its length, its form, and how its tokens are chosen.

    An answer has one form at most, which takes the package llguidance. One that ends by itself (`finish_reason` is
    "stop", and no text of `stop` ended it) has the form whole.

    Args:
        max_new_tokens: tokens of the answer at most, after its thought.
        temperature: of sampling; 0 takes the likeliest token each time.
        top_p: the likeliest tokens with this probability together are sampled from; `None` for all.
        top_k: so many of the likeliest tokens are sampled from; `None` for all.
        min_p: tokens are sampled from that have this share of the likeliest one's probability; `None` for all.
        repetition_penalty: above 1 makes earlier tokens less likely; `None` for no penalty.
        presence_penalty: what the logit of each token that the answer has is lowered by, from -2 to 2; `None` for 0.
        frequency_penalty: the same for each time that it has it.
        seed: of the answer's random numbers; `None` for other numbers each time.
        stop: the answer ends before any of these texts.
        drafts: tokens that are drafted from prompt and answer at most, see `PromptLookup`; 0 for none. There are drafts
            where they change no answer: on the CPU, where a step runs in one call (`fuse_decode`).
        thinking: whether the model thinks before it answers; `None` for the default of its chat template.
        max_thinking_tokens: tokens of the thought at most; then it is closed, so that an answer comes.
        chat_template_kwargs: values of variables of the chat template, such as `{"reasoning_effort": "low"}`; `None`
            for no others.
        schema: of the JSON that the answer is: an object, its text, the path of a file, or a class of pydantic.
        choices: the answer is one of these texts.
        regex: the answer has this form, as the Rust crate regex writes it.
        grammar: the answer has this form, as llguidance's Lark grammars write it.

    Raises:
        SettingError: a setting is out of its range, unsupported, or would be ignored.

    Example:
        >>> AnswerSettings(schema={"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]})
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    drafts: int = MOST_TOKENS
    thinking: bool | None = None
    max_thinking_tokens: int = 2048
    chat_template_kwargs: Mapping[str, Any] | None = None
    schema: Any = None
    choices: tuple[str, ...] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if self.temperature and not _LEAST <= self.temperature <= _MOST:
            raise SettingError(f"temperature must be 0, or from {_LEAST} to {_MOST:.0e}, got {self.temperature}.")
        for name in ("top_p", "top_k", "min_p", "seed"):
            if getattr(self, name) is not None and not self.temperature:
                raise SettingError(f"{name} is for sampling: give a temperature, such as 0.7, or drop it.")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                range_text = f"{least} or more" if most == math.inf else f"from {least} to {most}"
                raise SettingError(f"{name} must be {range_text}, got {value}.")
        try:
            checked_drafts("drafts", self.drafts)
        except (TypeError, ValueError) as error:
            raise SettingError(str(error)) from error
        if not all(self.stop):
            raise SettingError("stop must not have an empty text, before which every answer ends.")
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise SettingError(f"{given[1]} is a form of answers, and {given[0]} another one: drop one of them.")
        for name in given:
            try:
                object.__setattr__(self, name, checked_form(name, getattr(self, name)))
            except ValueError as error:
                raise SettingError(f"{name} {error}") from error

    @property
    def form(self) -> dict[str, Form]:
        """The setting that is the form of the answer, by its name; empty if it has none."""
        return {name: form for name in FORMS if (form := getattr(self, name)) is not None}

    @property
    def template_values(self) -> dict[str, Any]:
        """The values of variables of the chat template: `thinking`, by the names that templates have, and others."""
        named = {} if self.thinking is None else dict.fromkeys(SWITCHES, self.thinking)
        return named | dict(self.chat_template_kwargs or {})
