"""
Several continuations of one prompt, whose KV is stored once and read once a step, beside as many prompts of their own.

`steps`: decode steps of a few layers of the Llama-3.2-1B shape over random keys and values, in turns: eight sequences
that continue one prompt, and eight prompts of their own, in bfloat16 and in 4 bits. `beams`: whole generations by beam
search after a prompt of SmolLM2, with transformers' own cache and with ours. `questions`: questions about one document
of SmolLM2, one after the other and several at once. No peer for transformers shares a prefix;
vLLM (cascade attention) and llama.cpp (`kv-unified`) do in engines of their own.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache

from experiments.common.decoding import prefill
from experiments.common.harness import Cell, finish, rounded, table, turns
from experiments.common.options import plain_parser
from experiments.common.synthetic import fill, llama_1b_config
from experiments.common.texts import english_ids
from experiments.quality.quality_caches import stored_bytes
from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load

CACHES: dict[str, Callable[[Any], HybridCache]] = {
    "bfloat16": DynamicHybridCache,
    "4 bits": lambda config: QuantizedHybridCache(config, 4),
}
STEPS_A_SAMPLE = 3
QUESTION_TOKENS = 16
BEAM_ROUNDS, QUESTION_ROUNDS = 2, 1


def measure_steps(context: int, continuations: int, num_layers: int, rounds: int) -> Iterator[Cell]:
    """Yield seconds of a step, and bytes of the caches, for each type of the cache."""
    config = llama_1b_config(num_layers)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, make in CACHES.items():
        shared, alone = make(config), make(config)
        fill(shared, config, context, torch.bfloat16)
        of_one = stored_bytes(shared)
        shared.batch_repeat_interleave(continuations)
        fill(alone, config, context, torch.bfloat16, batch=continuations)
        ids = torch.randint(5, config.vocab_size, (continuations, 1), generator=torch.Generator().manual_seed(0))

        @torch.inference_mode()
        def step(cache: Cache) -> None:
            for _ in range(STEPS_A_SAMPLE):
                model(ids, **cache_argument(cache))  # noqa: B023

        caches = {"one prompt": shared, "a prompt each": alone}
        cell = turns({each: partial(step, cache) for each, cache in caches.items()}, rounds)
        seconds = {each: value / STEPS_A_SAMPLE for each, value in cell["median_seconds"].items()}
        sizes = {"one sequence": of_one} | {each: stored_bytes(cache) for each, cache in caches.items()}
        yield {
            "cache": name,
            "context": context,
            "continuations": continuations,
            "layers": num_layers,
            **cell,
            "median_seconds": seconds,
            "times_as_fast": seconds["a prompt each"] / seconds["one prompt"],
            "bytes": sizes,
            "memory_of_one": sizes["one prompt"] / sizes["one sequence"],
        }


def generate(model: Any, prompts: torch.Tensor, cache: Cache, new_tokens: int, **options: Any) -> list[list[int]]:
    """Answer prompts greedily, with so many tokens each."""
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        **cache_argument(cache),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        **options,
    )
    answers: list[list[int]] = output[:, prompts.shape[1] :].tolist()
    return answers


def measure_beams(model: Any, ids: torch.Tensor, beams: int, new_tokens: int) -> Cell:
    """Seconds of a beam search after a prompt that is stored already, and bytes of the caches after it."""
    makers: dict[str, Callable[[Any], Cache]] = {
        "stock": lambda config: DynamicCache(config=config),
        "ours": CACHES["bfloat16"],
        "ours, 4 bits": CACHES["4 bits"],
    }
    filled = {name: make(model.config) for name, make in makers.items()}
    for cache in filled.values():
        prefill(model, cache, ids[:, :-1])
    used: dict[str, Cache] = {}
    answers: dict[str, list[list[int]]] = {}

    def before(name: str) -> None:
        used[name] = copy.deepcopy(filled[name])

    def search(name: str) -> None:
        if name == "stock":  # transformers' cache of one sequence ends in an error
            used[name].batch_repeat_interleave(beams)
        answers[name] = generate(model, ids, used[name], new_tokens, num_beams=beams)

    cell = turns({name: partial(search, name) for name in makers}, BEAM_ROUNDS, before)
    seconds = cell["median_seconds"]
    return {
        "context": ids.shape[1],
        "beams": beams,
        "new_tokens": new_tokens,
        **cell,
        "times_as_fast_as_stock": {name: seconds["stock"] / each for name, each in seconds.items()},
        "bytes": {name: stored_bytes(cache) for name, cache in used.items()},
        "same_answer_as_stock": {name: answer == answers["stock"] for name, answer in answers.items()},
    }


def measure_questions(model: Any, text: torch.Tensor, count: int, together: list[int], new_tokens: int) -> Cell:
    """Seconds of answers to the questions at the end of a text, so many at once; what is before them is stored."""
    context = text.shape[1] - count * QUESTION_TOKENS
    document, questions = text[:, :context], text[:, context:].view(count, QUESTION_TOKENS)
    cache = DynamicHybridCache(model.config)
    prefill(model, cache, document)
    answers: dict[str, list[list[int]]] = {}

    def ask(at_once: int) -> None:
        answers[str(at_once)] = []
        for asked in questions.split(at_once):
            prompts = torch.cat([document.expand(len(asked), -1), asked], dim=1)
            answers[str(at_once)] += generate(model, prompts, cache, new_tokens)
            cache.crop(context - cache.get_seq_length())
            cache.batch_select_indices(torch.tensor([0]))

    cell = turns({str(each): partial(ask, each) for each in (1, *together)}, QUESTION_ROUNDS)
    seconds = cell["median_seconds"]
    return {
        "context": context,
        "questions": count,
        "new_tokens": new_tokens,
        **cell,
        "times_as_fast_as_one_after_the_other": {name: seconds["1"] / each for name, each in seconds.items()},
        "same_answers": {name: found == answers["1"] for name, found in answers.items()},
    }


def main() -> None:
    parser = plain_parser("continuations", __doc__)
    parser.add_argument("--contexts", type=int, nargs="*", default=[2_048, 32_768])
    parser.add_argument("--continuations", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--beam-context", type=int, default=8_000)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--question-context", type=int, default=4_000)
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args()
    steps: list[Cell] = []
    for context in options.contexts:
        for cell in measure_steps(context, options.continuations, options.layers, options.rounds):
            print(table("a step", cell), flush=True)
            steps.append(cell)
    loaded: Any = load("smollm2-135m", torch.float32, "cpu")
    model, tokenizer = loaded
    beams = measure_beams(model, english_ids(tokenizer, options.beam_context), options.beams, options.new_tokens)
    print(table("beams", beams), flush=True)
    text = english_ids(tokenizer, options.question_context + options.questions * QUESTION_TOKENS)
    questions = measure_questions(model, text, options.questions, options.at_once, options.new_tokens)
    print(table("questions at once", questions), flush=True)
    answers = {f"{cell['cache']}, {cell['context']}": cell["times_as_fast"] for cell in steps}
    answers |= beams["times_as_fast_as_stock"]
    record = {"model": "llama-3.2-1b-random", "cells": steps, "beams": beams, "questions": questions}
    finish("continuations", record, rounded(answers), options.out)


if __name__ == "__main__":
    main()
