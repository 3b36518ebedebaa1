"""
Pass keys: five digits, hidden somewhere in a long text and asked for at its end (arXiv:2305.16300), or ten of them.

The prefill runs once for each prompt, in full precision and in chunks, and every cache is filled with its keys and
values. Questions and right answers then follow in steps, one after the other. A key is found if each token of it is the
most likely one after those before it, so that greedy decoding would answer with it.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from experiments.common.decoding import prefill
from experiments.quality.quality_caches import CACHES, REFERENCE, STEP_TOKENS, filled
from hf_hybrid_cache.cache_argument import cache_argument

OWNERS = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry", "Irene", "Jacob")
NEEDLE = "\n\nThe pass key{of} is {key}. Remember it. {key} is the pass key{of}.\n\n"
# The model completes this text: SmolLM2-135M-Instruct finds the key more often than with its chat template.
QUESTION = "\n\nThe pass key{of} is"
ANSWER = " {key}"
PREFILL_CHUNK = 2048


@torch.inference_mode()
def found_by(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    start: torch.Tensor,
    text: torch.Tensor,
    context: int,
    depths: Sequence[float],
    digits: random.Random,
    names: Sequence[str],
) -> dict[str, list[str]]:
    """
    Return the pass keys that each cache finds in one prompt; where full precision finds none, no other cache is asked.

    Args:
        model: of any decoder architecture with full attention.
        tokenizer: of the model.
        start: [1, tokens], what every prompt begins with; may be empty.
        text: [1, tokens], at least `context`.
        context: tokens, questions and answers included.
        depths: of the keys, ascending shares of the text; one key is without an owner.
        digits: where keys come from.
        names: keys of `CACHES`, the reference first.
    """

    def ids(form: str, of: str, key: str) -> torch.Tensor:
        return tokenizer(form.format(of=of, key=key), add_special_tokens=False, return_tensors="pt").input_ids

    owners = [f" of {owner}" for owner in OWNERS[: len(depths)]] if len(depths) > 1 else [""]
    facts = [(of, str(digits.randrange(10_000, 100_000))) for of in owners]
    needles = [ids(NEEDLE, *fact) for fact in facts]
    asked = digits.sample(facts, len(facts))  # in another order than they stand there
    exam = [(ids(QUESTION, *fact), ids(ANSWER, *fact)) for fact in asked]
    follows = torch.cat([part for pair in exam for part in pair], dim=1)
    room = context - sum(part.shape[1] for part in (start, *needles, follows))
    if room < 0:
        raise ValueError(f"The facts and the questions about them take {context - room:,} tokens, not {context:,}.")
    cuts = [round(room * depth) for depth in depths]
    pieces = [part for pair in zip(text[:, :room].tensor_split(cuts, dim=1), needles, strict=False) for part in pair]
    prefilled = DynamicCache(config=model.config)
    prefill(model, prefilled, torch.cat([start, *pieces, text[:, cuts[-1] : room]], dim=1), PREFILL_CHUNK)
    found: dict[str, list[str]] = {}
    for name in names:
        cache = filled(CACHES[name](model.config), prefilled)
        steps = [model(piece, **cache_argument(cache)).logits[0].argmax(-1) for piece in follows.split(STEP_TOKENS, 1)]
        likely, place, found[name] = torch.cat(steps), 0, []
        for (question, answer), (_, key) in zip(exam, asked, strict=True):
            place += question.shape[1]
            # The output at a token is the token after it.
            if torch.equal(likely[place - 1 : place - 1 + answer.shape[1]], answer[0]):
                found[name].append(key)
            place += answer.shape[1]
        if not found[REFERENCE]:
            break
    return found


def retrieve(subject: Any, context: int, keys: int, at_once: bool) -> dict[str, Any]:
    """
    Count the pass keys that full precision finds, and those of them that each cache finds.

    Args:
        subject: a `quality.Subject`.
        context: tokens of a prompt.
        keys: how many, ever deeper in the text.
        at_once: all in one prompt, or each in one of its own.
    """
    depths = [(index + 0.5) / keys for index in range(keys)]
    digits = random.Random(context)
    prompts = [
        found_by(subject.model, subject.tokenizer, subject.start, subject.text, context, each, digits, subject.names)
        for each in ([depths] if at_once else [[depth] for depth in depths])
    ]
    counted = sum(len(found[REFERENCE]) for found in prompts)
    return {
        "context_tokens": context,
        "asked": keys,
        "counted": counted,
        "found": {
            name: sum(len({*found.get(name, ())} & {*found[REFERENCE]}) for found in prompts) for name in subject.names
        },
        "prompts": prompts,
    }
