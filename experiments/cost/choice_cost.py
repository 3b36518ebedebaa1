"""
The cost of choosing codecs: a prefill that chooses them, against one with given codecs, or with plain rotated codes.

Then, without the model, what the chosen codes cost beside the rotated ones: storing the states of the prefill, and one
step of attention on the CPU, in all layers.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from experiments.common import records
from experiments.common.decoding import prefill
from experiments.common.texts import english_ids
from experiments.common.timing import in_turns, medians
from hf_hybrid_cache import HybridCache, KVCodec, Placement, QuantizedHybridCache, minmax
from hf_hybrid_cache.models import load

# A sample is so many calls of attention.
REPEATS = 20


def prefill_samples(
    model: PreTrainedModel, caches: dict[str, Callable[[], HybridCache]], ids: torch.Tensor, chunk: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a prefill with each cache."""
    cache = caches["given"]()

    def make(name: str) -> None:
        nonlocal cache
        cache = caches[name]()

    return in_turns({name: lambda: prefill(model, cache, ids, chunk) for name in caches}, rounds, make)


def part_samples(
    model: PreTrainedModel, codecs: dict[str, dict[int, KVCodec]], states: DynamicCache, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of storing states, and of a step's attention to them, by codecs."""
    pairs = [
        (layer.keys, layer.values)
        for layer in states.layers
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    ]

    def make(name: str) -> HybridCache:
        return HybridCache(model.config, Placement(cpu_decode=True), codec=codecs[name])

    def store(cache: HybridCache) -> HybridCache:
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys, values, layer)
        return cache

    empty = make("given")

    def prepare(name: str) -> None:
        nonlocal empty
        empty = make(name)

    storing = in_turns({name: lambda: store(empty) for name in codecs}, rounds, prepare)
    heads = model.config.num_attention_heads
    queries = [torch.randn(1, heads, 1, keys.shape[3]) for keys, _ in pairs]
    attention: dict[str, list[float]] = {name: [] for name in codecs}
    # Where memory lies changes its speed by some percent, so each round has caches of its own.
    for _ in range(rounds):
        filled = {name: store(make(name)) for name in codecs}
        handles = {
            name: [
                cache.update(keys[:, :, -1:], values[:, :, -1:], layer) for layer, (keys, values) in enumerate(pairs)
            ]
            for name, cache in filled.items()
        }
        samples = in_turns({name: partial(attend, queries, handles[name]) for name in codecs}, 3, lambda name: None)
        for name, seconds in medians(samples).items():
            attention[name].append(seconds / REPEATS)
    return {"storing": storing, "attention": attention}


def attend(queries: list[torch.Tensor], handles: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A query to each layer, `REPEATS` times."""
    for _ in range(REPEATS):
        for query, (keys, values) in zip(queries, handles, strict=True):
            scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def median_ratio(samples: dict[str, list[float]], name: str, other: str) -> float:
    """Return the median of the ratios of samples of the same rounds."""
    return statistics.median(ours / theirs for ours, theirs in zip(samples[name], samples[other], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder of the record (default: in results/choice_cost)")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model, torch.float32, "cpu")
    assert tokenizer is not None
    ids = english_ids(tokenizer, arguments.tokens)
    first = QuantizedHybridCache(model.config, bits=arguments.bits)
    prefill(model, first, ids, arguments.chunk)
    chosen: dict[int, KVCodec] = first.codecs
    rotated = HybridCache(model.config, codec=minmax(arguments.bits, rotate=True)).codecs
    del first
    caches: dict[str, Callable[[], HybridCache]] = {
        "given": lambda: HybridCache(model.config, codec=chosen),
        "rotated": lambda: HybridCache(model.config, codec=rotated),
        "chosen": lambda: QuantizedHybridCache(model.config, bits=arguments.bits),
    }
    prefills = prefill_samples(model, caches, ids, arguments.chunk, arguments.rounds)
    states = DynamicCache(config=model.config)
    prefill(model, states, ids, arguments.chunk)
    parts = part_samples(model, {"given": chosen, "rotated": rotated}, states, arguments.rounds)
    ratios = {
        "prefill, chosen over given": median_ratio(prefills, "chosen", "given"),
        "prefill, chosen over rotated": median_ratio(prefills, "chosen", "rotated"),
        **{f"{part}, given over rotated": median_ratio(samples, "given", "rotated") for part, samples in parts.items()},
    }
    samples = {"prefill": prefills, **parts}
    for part, by_codecs in samples.items():
        for name, seconds in medians(by_codecs).items():
            print(f"{arguments.tokens:,} tokens, {part}, codecs {name}: {seconds:.4f} s")
    cell = {
        "model": Path(arguments.model).name,
        "tokens": arguments.tokens,
        "chunk": arguments.chunk,
        "bits": arguments.bits,
        "median_seconds": {part: medians(by_codecs) for part, by_codecs in samples.items()},
        "ratios": ratios,
        "samples_seconds": samples,
    }
    print(f"record: {records.save('choice_cost', {'cells': [cell]}, arguments.out)}")
    print(json.dumps({name: round(ratio, 4) for name, ratio in ratios.items()}))


if __name__ == "__main__":
    main()
