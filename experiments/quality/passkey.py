"""
Pass-key retrieval: five digits, hidden somewhere in a long text and asked for at its end (arXiv:2305.16300).

The prefill runs once for each prompt, in full precision and in chunks, and every cache is filled with its keys and
values. The question and the digits then follow in steps. The cache has found the key if greedy decoding would answer
with it, which is so if each token of the key is the most likely one after those before it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache

from experiments.common.decoding import prefill
from experiments.quality.quality_caches import CACHES, REFERENCE, STEP_TOKENS, filled
from hf_hybrid_cache.cache_argument import cache_argument

NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
# The model completes this text: SmolLM2-135M-Instruct finds the key more often than with its chat template.
QUESTION = "\n\nThe pass key is"
ANSWER = " {key}"
PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class Prompt:
    """
    A text with a pass key.

    Attributes:
        key: five digits.
        depth: share of the text that is before the key.
        before: [1, tokens], the text before the key.
        after: [1, tokens], the key and the rest of the text.
        question: [1, tokens]
        answer: [1, tokens]
    """

    key: str
    depth: float
    before: torch.Tensor
    after: torch.Tensor
    question: torch.Tensor
    answer: torch.Tensor


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, start: torch.Tensor, text: torch.Tensor, context: int, depths: int
) -> list[Prompt]:
    """
    Prompts of `context` tokens with their answers, the key ever deeper in the text.

    Args:
        tokenizer: of the model.
        start: [1, tokens], what every prompt begins with; may be empty.
        text: [1, tokens], at least `context`.
        context: tokens, question and answer included.
        depths: how many prompts.
    """
    keys = random.Random(context)
    prompts = []
    for index in range(depths):
        key, depth = str(keys.randrange(10_000, 100_000)), (index + 0.5) / depths
        needle, question, answer = (_ids(tokenizer, part.format(key=key)) for part in (NEEDLE, QUESTION, ANSWER))
        room = context - sum(part.shape[1] for part in (start, needle, question, answer))
        cut = round(room * depth)
        before = torch.cat([start, text[:, :cut]], dim=1)
        after = torch.cat([needle, text[:, cut:room]], dim=1)
        prompts.append(Prompt(key, depth, before, after, question, answer))
    return prompts


def retrieve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    names: list[str],
) -> list[dict[str, Any]]:
    """
    Return the answer of each cache to each prompt, up to its first wrong token.

    Prompts that full precision does not answer do not count, and the other caches are not asked.

    Args:
        model: of any decoder architecture with full attention.
        tokenizer: of the model.
        prompts: from `make_prompts`.
        names: keys of `CACHES`, the reference first.
    """
    outcomes = []
    for prompt, prefilled in _prefilled(model, prompts):
        expected = prompt.answer[0].tolist()
        answers: dict[str, list[int]] = {}
        for name in names:
            cache = filled(CACHES[name](model.config), prefilled)
            answers[name] = likely_answer(model, cache, prompt)
            if answers[REFERENCE] != expected:
                break
        outcomes.append(
            {
                "depth": prompt.depth,
                "key": prompt.key,
                "counted": answers[REFERENCE] == expected,
                "found": [name for name, answer in answers.items() if answer == expected],
                "answers": {name: str(tokenizer.decode(answer)) for name, answer in answers.items()},
            }
        )
    return outcomes[::-1]


def cell(context: int, outcomes: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Make a record of outcomes: the number of keys that count, and of those that each cache finds."""
    counted = [outcome for outcome in outcomes if outcome["counted"]]
    return {
        "measure": "passkey",
        "context_tokens": context,
        "asked": len(outcomes),
        "counted": len(counted),
        "found": {name: sum(name in outcome["found"] for outcome in counted) for name in names},
        "prompts": outcomes,
    }


@torch.inference_mode()
def likely_answer(model: PreTrainedModel, cache: Cache, prompt: Prompt) -> list[int]:
    """Return the greedy answer up to its first wrong token, by one pass over the expected one."""
    tokens = torch.cat([prompt.question, prompt.answer[:, :-1]], dim=1)
    steps = [model(piece, **cache_argument(cache)).logits[0].argmax(-1) for piece in tokens.split(STEP_TOKENS, dim=1)]
    expected = prompt.answer[0]
    likely = torch.cat(steps)[-len(expected) :]
    wrong = (likely != expected).nonzero()
    return likely[: int(wrong[0]) + 1 if len(wrong) else None].tolist()


def _prefilled(model: PreTrainedModel, prompts: list[Prompt]) -> Iterator[tuple[Prompt, Cache]]:
    """Yield each prompt with its full-precision cache, the deepest key first, so that all share the text before it."""
    shared = DynamicCache(config=model.config)
    prefill(model, shared, prompts[-1].before, PREFILL_CHUNK)
    for prompt in reversed(prompts):
        shared.crop(prompt.before.shape[1] - shared.get_seq_length())
        cache = filled(CACHES[REFERENCE](model.config), shared)
        prefill(model, cache, prompt.after, PREFILL_CHUNK)
        yield prompt, cache


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
