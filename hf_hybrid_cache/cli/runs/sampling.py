"""Choosing the tokens of an answer."""

from dataclasses import dataclass
from typing import Any

import torch

from ..console import UsageError
from ..distributed.ranks import num_processes


@dataclass(frozen=True)
class Sampling:
    """
    Settings for choosing the tokens of an answer.

    Attributes:
        temperature: 0 takes the likeliest token each time.
        top_p: the likeliest tokens with this probability together are sampled from; `None` for all tokens.
        repetition_penalty: above 1 makes earlier tokens less likely; `None` for no penalty.
        seed: of the random numbers; `None` for other numbers each time.

    Raises:
        UsageError: an option is out of its range, or would be ignored.
    """

    temperature: float = 0.0
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for option, value in (("--top-p", self.top_p), ("--seed", self.seed)):
            if value is not None and not self.temperature:
                raise UsageError(f"{option} is for sampling: pass --temperature, such as 0.7, or drop it.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1, got {self.top_p}.")
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise UsageError(f"--repetition-penalty must be above 0, got {self.repetition_penalty}.")
        if self.temperature and self.seed is None and num_processes() > 1:
            raise UsageError("With torchrun all processes must choose the same tokens: pass --seed.")

    def options(self) -> dict[str, Any]:
        """Arguments of `model.generate`, which override all settings of the model."""
        return {
            "do_sample": self.temperature > 0,
            "num_beams": 1,
            # transformers would warn that greedy search ignores settings of the model.
            "temperature": self.temperature or None,
            "top_k": None,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
        }

    def start(self) -> None:
        """Seed the random numbers before an answer."""
        if self.seed is not None:
            torch.manual_seed(self.seed)


GREEDY = Sampling()
