"""The choice of an answer's tokens: by its settings, and by what it follows of a model's generation config."""

from dataclasses import fields
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .settings import AnswerSettings

# Of a model's generation config: its special tokens, and the tokens that an answer may not, or rather should, have.
_FOLLOWED = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "bad_words_ids",
    "begin_suppress_tokens",
    "sequence_bias",
    "suppress_tokens",
}
# Of settings of answers, what a generation config may have for sampling.
_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# What the settings of an answer, and the cache, decide; every other field is transformers' default.
_DECIDED = {each.name for each in fields(AnswerSettings)} | {"do_sample", "max_length", "cache_implementation"}


def generate_arguments(of_model: GenerationConfig, settings: AnswerSettings) -> dict[str, Any]:
    """
    Return arguments of `model.generate`: each field of its generation config, so that none of the model's acts unseen.

    The search is greedy: where tokens are sampled, `Sampling` leaves it one.
    """
    return {
        **dict.fromkeys(_field_names()),
        **{name: getattr(of_model, name) for name in _FOLLOWED},
        "max_new_tokens": settings.max_new_tokens,
        "repetition_penalty": settings.repetition_penalty,
        "do_sample": False,
        "num_beams": 1,
        "num_return_sequences": 1,
        "use_cache": True,
    }


def not_followed(of_model: GenerationConfig) -> dict[str, Any]:
    """Return what a model's generation config asks for, beside settings of answers, and answers do not follow."""
    ours = generate_arguments(of_model, AnswerSettings())
    theirs = {name: getattr(of_model, name) for name in ours.keys() - _DECIDED}
    return {name: value for name, value in sorted(theirs.items()) if value and value != ours[name]}


def sampling(of_model: GenerationConfig) -> dict[str, Any]:
    """Return the settings of answers with which a model's generation config samples; empty if it does not."""
    if not of_model.do_sample:
        return {}
    values = {name: getattr(of_model, name, None) for name in _SAMPLED}
    return {name: value for name, value in values.items() if value is not None}


def _field_names() -> list[str]:
    return [name for name in vars(GenerationConfig()) if not name.startswith("_") and name != "transformers_version"]


class Penalties(LogitsProcessor):
    """
    Lowers the logits of tokens that an answer has, as OpenAI's API describes it.

    Args:
        settings: of the answers.
        start: tokens of the prompts.
    """

    def __init__(self, settings: AnswerSettings, start: int):
        self._presence, self._frequency = settings.presence_penalty or 0, settings.frequency_penalty or 0
        self._start = start

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        answers = input_ids[:, self._start :]
        counts = torch.zeros_like(scores).scatter_add_(1, answers, torch.ones_like(answers, dtype=scores.dtype))
        penalized: Any = scores - self._presence * (counts > 0) - self._frequency * counts
        return penalized


class Sampling(LogitsProcessor):
    """
    Draws the next token of each answer, and leaves greedy search no other.

    Each answer has random numbers of its own; `generate` would take those of the process. With a seed they are the same
    alone and beside other answers.

    Args:
        settings: of the answers.
        num_answers: that are generated together.
        device: of the logits.
    """

    def __init__(self, settings: AnswerSettings, num_answers: int, device: torch.device):
        self._temperature = settings.temperature
        self._warpers: list[LogitsProcessor] = []
        if settings.top_k is not None:
            self._warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p is not None:
            self._warpers.append(TopPLogitsWarper(settings.top_p))
        if settings.min_p is not None:
            self._warpers.append(MinPLogitsWarper(settings.min_p))
        self._generators = [torch.Generator(device) for _ in range(num_answers)]
        for generator in self._generators:
            if settings.seed is None:
                generator.seed()
            else:
                generator.manual_seed(settings.seed)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # The largest logit is finite, and becomes 0, which no temperature changes.
        finite = scores.clamp(max=torch.finfo(scores.dtype).max)
        scaled: Any = (finite - finite.amax(dim=-1, keepdim=True)) / self._temperature
        for warper in self._warpers:
            scaled = warper(input_ids, scaled)
        rows = zip(scaled.softmax(dim=-1), self._generators, strict=True)
        tokens = torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
        drawn: Any = torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0)
        return drawn
