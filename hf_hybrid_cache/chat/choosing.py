"""The choice of an answer's tokens: by its settings, and by what it follows of a model's generation config."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..token_ids import num_common
from .forms import Form, grammar_of
from .settings import AnswerSettings, SettingError
from .thinking import ThoughtTokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

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


class TokenChoice(NamedTuple):
    """A token of an answer, its log-probability, and the likeliest tokens there with theirs."""

    token_id: int
    logprob: float
    likeliest: list[tuple[int, float]]


class LogProbabilities(LogitsProcessor):
    """
    Notes the log-probabilities of the next tokens, which it leaves as they are.

    Args:
        most: of the likeliest tokens of each answer that are told beside the chosen one.
    """

    def __init__(self, most: int):
        self._most, self._noted = most, torch.empty(0)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._noted = scores.log_softmax(dim=-1)
        return scores

    def of(self, tokens: Sequence[int]) -> list[TokenChoice]:
        """Return the choices of these tokens, one of each answer."""
        chosen = self._noted[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
        top = self._noted.topk(min(self._most, self._noted.shape[1]))
        pairs = [[*zip(*row, strict=True)] for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        return [*map(TokenChoice, tokens, chosen, pairs)]


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


class Forming(LogitsProcessor):
    """
    Leaves each answer the tokens with which it can have its form; once that is whole, the end-of-text tokens.

    A thought before the answer is free, but does not end the text. What a model's generation config would never let
    come may come where the form leaves nothing else. Tokens may be other ones than in the call before, as those of
    drafts are.

    Args:
        name: of the form, see `AnswerSettings`.
        form: of the answers.
        tokenizer: of the model, as llguidance has it.
        thoughts: of each answer.
        start: tokens of the prompts.

    Raises:
        SettingError: the tokenizer cannot write the form. A call raises it, too.
    """

    def __init__(self, name: str, form: Form, tokenizer: "LLTokenizer", thoughts: Sequence[ThoughtTokens], start: int):
        from llguidance import LLMatcher

        self._name, self._thoughts, self._start = name, thoughts, start
        matcher = LLMatcher(tokenizer, grammar_of(name, form), log_level=0)
        matcher.compute_bitmask()  # tells whether an answer can begin
        self._require(matcher)
        # Of each answer, with the tokens that it has taken.
        self._matchers = [(matcher.deep_copy(), list[int]()) for _ in thoughts]
        self._thinking = np.full(-(-tokenizer.vocab_size // 32), -1, np.int32)
        for token in tokenizer.eos_tokens:
            self._thinking.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        from llguidance.numpy import fill_next_token_bitmask

        answers = input_ids[:, self._start :].tolist()
        bits = np.zeros((len(answers), len(self._thinking)), np.int32)
        for row, (thought, token_ids) in enumerate(zip(self._thoughts, answers, strict=True)):
            thought.read(token_ids)
            begin = thought.form_begin(token_ids)
            if begin is None:
                bits[row] = self._thinking
                continue
            marks, needs_mark = thought.opening(token_ids)
            matcher, is_whole = self._matchers[row][0], self._take(row, token_ids[begin:])
            if not marks or (is_whole and not needs_mark):
                fill_next_token_bitmask(matcher, bits, row)
                self._require(matcher)
            for token in marks:
                bits[row].view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        # Logits may be more or fewer than the tokenizer's tokens.
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=scores.shape[1])
        left: Any = scores.clamp(min=torch.finfo(scores.dtype).min)
        return left.masked_fill_(torch.from_numpy(allowed == 0).to(scores.device), -torch.inf)

    def forced(self, token_ids: Sequence[int]) -> list[int]:
        """
        Return the tokens that the form of the first answer lets come next alone, as far as there are such.

        Args:
            token_ids: of the prompt and the answer so far.
        """
        thought, answer = self._thoughts[0], [*token_ids[self._start :]]
        thought.read(answer)
        begin = thought.form_begin(answer)
        if begin is None or thought.opening(answer)[0] or not self._take(0, answer[begin:]):
            return []
        forced: list[int] = self._matchers[0][0].compute_ff_tokens()
        return forced

    def _take(self, row: int, token_ids: list[int]) -> bool:
        """Let an answer have these tokens; return whether all are of the form, as those after its end are not."""
        matcher, taken = self._matchers[row]
        same = num_common(taken, token_ids)
        if same < len(taken):
            matcher.rollback(len(taken) - same)
            del taken[same:]
        taken += token_ids[same : same + matcher.try_consume_tokens(token_ids[same:])]
        return len(taken) == len(token_ids)

    def _require(self, matcher: Any) -> None:
        """Raise an error if a matcher has failed."""
        if matcher.is_error():
            why = matcher.get_error().strip().partition("\n")[0]
            raise SettingError(f"{self._name} is a form that no tokens of this model can go on with: {why}.")


class Sampling(LogitsProcessor):
    """
    Draws the next token of each answer, and leaves greedy search no other.

    Each answer has random numbers of its own; `generate` would take those of the process. With a seed they are the same
    alone and beside other answers.

    Args:
        settings: of the answers.
        seeds: of the answers that are generated together; `None` for any.
        device: of the logits.
    """

    def __init__(self, settings: AnswerSettings, seeds: Sequence[int | None], device: torch.device):
        self._temperature = settings.temperature
        self._warpers: list[LogitsProcessor] = []
        if settings.top_k is not None:
            self._warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p is not None:
            self._warpers.append(TopPLogitsWarper(settings.top_p))
        if settings.min_p is not None:
            self._warpers.append(MinPLogitsWarper(settings.min_p))
        self._generators = [torch.Generator(device) for _ in seeds]
        for generator, seed in zip(self._generators, seeds, strict=True):
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)

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
