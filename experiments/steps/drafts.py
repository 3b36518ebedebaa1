"""
Tokens a second of answers with drafts over those without, greedy, in turns: prompt lookup decoding by `PromptLookup`.

Weights in 4 bits, keys and values in 8, documents that everybody has: the source of Python's argparse, and the pages of
this project. SmolLM2-135M answers by itself, up to an end-of-text token, and follows few instructions; so some answers
are given, as a perfect model would write them: each of their tokens is computed, and chosen whatever its logits are.
The shape of Llama-3.2-1B has random weights, keys and values: all of its answers are given. They are those of SmolLM2,
with its prompts, so drafts are accepted as there.
"""

import argparse
import copy
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LogitsProcessor

from experiments.common.harness import Cell, publish, turns
from experiments.common.options import plain_parser
from experiments.common.synthetic import fill
from hf_hybrid_cache import PromptLookup, QuantizedHybridCache, fuse_decode, get_num_threads, prefill, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load

PAGES = Path(__file__).parents[2] / "docs"
SMALL, LARGE = "smollm2-135m", "llama-3.2-1b-random"
# Characters of a part of a document that is copied, about 600 tokens.
PASSAGE = 2400
KV_BITS = 8


@dataclass(frozen=True)
class Task:
    """
    A task.

    Attributes:
        document: a key of `DOCUMENTS`.
        asked: what follows it; `None` where a passage follows, and its beginning, which is to be gone on with.
        answer: makes one of the document's second half, word for word; `None` for the model's own.
    """

    document: str
    asked: str | None
    answer: Callable[[str], str] | None = None


def _random_words(half: str) -> str:
    letters = Random(0).choices("abcdefghijklmnopqrstuvwxyz    .,\n", k=len(half))
    return "".join(letters)


def _functions(half: str) -> str:
    found = re.findall(r"def (\w+)\((.*?)\):", half, re.DOTALL)
    return json.dumps([{"name": name, "arguments": re.split(r",\s*", given)} for name, given in found])


DOCUMENTS: dict[str, Callable[[], str]] = {
    "code": lambda: inspect.getsource(argparse),
    "text": lambda: "\n\n".join(path.read_text() for path in sorted(PAGES.glob("*.md"))),
}
TASKS: dict[str, Task] = {
    "copy a passage": Task("text", None),
    "copy, given": Task("code", "Repeat the second half.", str),
    "edit of code, given": Task("code", "Rename self.", lambda half: re.sub(r"\bself\b", "parser", half)),
    "edit of text, given": Task("text", "Say token instead of step.", lambda half: half.replace("step", "token")),
    "extraction": Task("code", "List the names of all classes and functions, each with its arguments."),
    "extraction, given": Task("code", "List all functions and their arguments as JSON.", _functions),
    "summary": Task("text", "Sum this up."),
    "answer with quotes": Task("text", "What is a block? Quote the sentences that say so."),
    "free answer": Task("text", "Tell a story about a dragon and a baker."),
    "other text, given": Task("code", "Talk of something else.", lambda _: DOCUMENTS["text"]()),
    "random text, given": Task("text", "Type anything.", _random_words),
}


class Given(LogitsProcessor):
    """Lets each token of an answer be the next one, after a prompt of so many tokens."""

    def __init__(self, answer: list[int], start: int):
        self._answer, self._start = answer, start

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, self._answer[input_ids.shape[1] - self._start]] = torch.inf
        return scores


@dataclass
class Asked:
    """A prompt, `[1, tokens]`, and the tokens of its answer, if that is given."""

    prompt: torch.Tensor
    answer: list[int] | None


def asked(task: Task, tokenizer: Any, num_tokens: int, new_tokens: int) -> Asked:
    """Return the prompt of a task about the first tokens of its document, and its answer."""
    ids = tokenizer(DOCUMENTS[task.document](), verbose=False)["input_ids"]
    document = tokenizer.decode(ids[:num_tokens])
    start = document.index("\n", len(document) // 2) + 1
    if task.asked is None:
        passage = document[start : start + PASSAGE]
        text = "\n\n\n".join((document, passage, passage[: passage.index("\n", len(passage) // 4) + 1]))
        return Asked(tokenizer(text, return_tensors="pt", verbose=False)["input_ids"], None)
    messages = [{"role": "user", "content": f"{document}\n\n{task.asked}"}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(messages, **options)["input_ids"]
    answer = None
    if task.answer is not None:
        answer = tokenizer(task.answer(document[start:]), verbose=False)["input_ids"][:new_tokens]
    return Asked(prompt, answer)


def measure(model: Any, given: Asked, filled: QuantizedHybridCache, new_tokens: int, rounds: int) -> Cell:
    """A cell: seconds of an answer with and without drafts, how many times as fast it is, and what was accepted."""
    prompt, used = given.prompt, dict[str, Any]()
    answers, lookups = dict[str, list[int]](), dict[str, PromptLookup]()
    processors, number = [], new_tokens
    if given.answer is not None:
        processors, number = [Given(given.answer, prompt.shape[1])], len(given.answer)

    def before(name: str) -> None:
        used[name], lookups[name] = copy.deepcopy(filled), PromptLookup(15 if name == "drafts" else 0)

    def answer(name: str) -> None:
        output = model.generate(
            prompt,
            **cache_argument(used[name]),
            custom_generate=lookups[name],
            logits_processor=processors,
            do_sample=False,
            max_new_tokens=number,
            min_new_tokens=number if processors else None,
        )
        answers[name] = output[0, prompt.shape[1] :].tolist()

    cell = turns({name: partial(answer, name) for name in ("no drafts", "drafts")}, rounds, before)
    seconds, lookup = cell["median_seconds"], lookups["drafts"]
    given.answer = answers["no drafts"]
    return {
        "prompt_tokens": prompt.shape[1],
        "answer_tokens": len(given.answer),
        "times_as_fast": seconds["no drafts"] / seconds["drafts"],
        "drafted_tokens": lookup.drafted_tokens,
        "accepted_tokens": lookup.accepted_tokens,
        "passes_with_drafts": lookup.passes,
        "tokens_a_second": {name: len(answers[name]) / value for name, value in seconds.items()},
        "same_tokens": answers["drafts"] == answers["no drafts"],
        **cell,
    }


def main() -> None:
    parser = plain_parser("drafts", __doc__)
    parser.add_argument("--models", nargs="+", choices=[SMALL, LARGE], default=[SMALL, LARGE])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--documents", type=int, nargs="+", default=[2000, 8000], help="tokens")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    tokenizer: Any = load(SMALL, torch.bfloat16, "cpu")[1]
    of_small = dict[tuple[str, int], Asked]()

    def cells() -> Iterator[tuple[str, Cell]]:
        for name in (SMALL, *(set(arguments.models) - {SMALL})):
            model: Any = load(name, torch.bfloat16, "cpu")[0]
            quantize_weights(model, 4)
            fused = fuse_decode(model)
            for task in arguments.tasks:
                for num_tokens in arguments.documents:
                    cache = QuantizedHybridCache(model.config, KV_BITS)
                    if name == SMALL:
                        given = asked(TASKS[task], tokenizer, num_tokens, arguments.new_tokens)
                        of_small[task, num_tokens] = given
                        prefill(model, given.prompt[:, :-1], cache)
                    else:
                        given = of_small[task, num_tokens]
                        fill(cache, model.config, given.prompt.shape[1] - 1, torch.bfloat16)
                    is_given = given.answer is not None
                    cell = measure(model, given, cache, arguments.new_tokens, arguments.rounds)
                    about = {"model": name, "task": task, "document_tokens": num_tokens, "is_given": is_given}
                    yield f"{name}, {task}, {num_tokens}", {**about, **cell, "passes": repr(fused)}

    publish(
        "drafts", cells(), arguments.out, lambda cell: cell["times_as_fast"],
        weight_bits=4, kv_bits=KV_BITS, threads=get_num_threads(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
