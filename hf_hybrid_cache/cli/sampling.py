"""How the tokens of an answer are chosen."""

from dataclasses import dataclass
from typing import Any

import torch

from .console import UsageError
from .ranks import num_processes


@dataclass(frozen=True)
class Sampling:
    """
    What the options for sampling say.

    Args:
        temperature: 0 takes the likeliest token each time.
        top_p: sample from the likeliest tokens that have this probability together; `None` for all.
        repetition_penalty: above 1 makes tokens less likely that were there before; `None` for none.
        seed: of the random numbers; `None` for other ones each time.

    Raises:
        UsageError: an option would be ignored, or is out of its range.
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
        """Arguments of `generate`, none of them left to the model's own settings."""
        return {
            "do_sample": self.temperature > 0,
            "num_beams": 1,
            # Of a model's own settings transformers would warn that greedy ignores them.
            "temperature": self.temperature or None,
            "top_k": None,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
        }

    def start(self) -> None:
        """Before an answer: with a seed it is the same each time."""
        if self.seed is not None:
            torch.manual_seed(self.seed)


GREEDY = Sampling()
