"""
Ten facts in one text, all of them asked for at its end: how many of them a cache still holds.

The prefill runs once for each context, in full precision and in chunks, and every cache is filled with its keys and
values. Questions and right answers then follow in steps, one after the other; a fact is found if each token of its
answer is the most likely one after those before it.
"""

import random
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from experiments.common.decoding import prefill
from experiments.quality.passkey import PREFILL_CHUNK
from experiments.quality.quality_caches import CACHES, REFERENCE, STEP_TOKENS, filled
from hf_hybrid_cache.cache_argument import cache_argument

OWNERS = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry", "Irene", "Jacob")
NEEDLE = "\n\nThe pass key of {owner} is {key}. Remember it. {key} is the pass key of {owner}.\n\n"
QUESTION = "\n\nThe pass key of {owner} is"
ANSWER = " {key}"


@torch.inference_mode()
def retrieve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    start: torch.Tensor,
    text: torch.Tensor,
    context: int,
    names: list[str],
) -> dict[str, Any]:
    """
    Return the facts that each cache finds.

    Args:
        model: of any decoder architecture with full attention.
        tokenizer: of the model.
        start: [1, tokens], what every prompt begins with; may be empty.
        text: [1, tokens], at least `context`.
        context: tokens, questions and answers included.
        names: keys of `CACHES`, the reference first.
    """

    def ids(form: str, owner: str, key: str) -> torch.Tensor:
        filled_in = form.format(owner=owner, key=key)
        return tokenizer(filled_in, add_special_tokens=False, return_tensors="pt").input_ids

    digits = random.Random(context)
    facts = [(owner, str(digits.randrange(10_000, 100_000))) for owner in OWNERS]
    needles = [ids(NEEDLE, *fact) for fact in facts]
    asked = digits.sample(facts, len(facts))  # in another order than they stand there
    exam = [(ids(QUESTION, *fact), ids(ANSWER, *fact)) for fact in asked]
    room = context - sum(part.shape[1] for part in (start, *needles, *(part for pair in exam for part in pair)))
    if room < 0:
        raise ValueError(f"Ten facts and the questions about them take {context - room:,} tokens, not {context:,}.")
    cuts = [round(room * (index + 0.5) / len(facts)) for index in range(len(facts))]
    pieces = [part for pair in zip(text[:, :room].tensor_split(cuts, dim=1), needles, strict=False) for part in pair]
    prompt = torch.cat([start, *pieces, text[:, cuts[-1] : room]], dim=1)
    follows = torch.cat([part for pair in exam for part in pair], dim=1)
    prefilled = DynamicCache(config=model.config)
    prefill(model, prefilled, prompt, PREFILL_CHUNK)
    found = {}
    for name in names:
        cache = filled(CACHES[name](model.config), prefilled)
        steps = [model(piece, **cache_argument(cache)).logits[0].argmax(-1) for piece in follows.split(STEP_TOKENS, 1)]
        likely, place, right = torch.cat(steps), 0, []
        for (question, answer), (owner, _) in zip(exam, asked, strict=True):
            place += question.shape[1]
            # The output at a token is the token after it.
            if torch.equal(likely[place - 1 : place - 1 + answer.shape[1]], answer[0]):
                right.append(owner)
            place += answer.shape[1]
        found[name] = right
    counted = found[REFERENCE]
    return {
        "asked": len(facts),
        "counted": len(counted),
        "found": {name: sum(owner in counted for owner in owners) for name, owners in found.items()},
        "owners": found,
    }
