"""
The cost of choosing codecs: a prefill that chooses them, against one with given codecs, or with plain rotated codes.

Then, without the model, what the chosen codes cost beside the rotated ones: storing the states of the prefill, and one
step of attention on the CPU, in all layers.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicCache

from experiments.common import records
from experiments.common.decoding import prefill
from experiments.common.options import plain_parser
from experiments.common.texts import english_ids
from experiments.common.timing import in_turns, medians
from experiments.quality.quality_caches import filled, states_of
from hf_hybrid_cache import HybridCache, QuantizedHybridCache, minmax
from hf_hybrid_cache.models import load

# A sample is so many calls of attention.
REPEATS = 20
Samples = dict[str, list[float]]


def in_turns_with(
    makers: dict[str, Callable[[], HybridCache]], action: Callable[[HybridCache], object], rounds: int
) -> Samples:
    """Return the seconds of an action with an empty cache of each kind."""
    empty: dict[str, HybridCache] = {}

    def make(name: str) -> None:
        empty[name] = makers[name]()

    def run(name: str) -> None:
        action(empty[name])

    return in_turns({name: partial(run, name) for name in makers}, rounds, make)


def attention_samples(
    makers: dict[str, Callable[[], HybridCache]], states: DynamicCache, heads: int, rounds: int
) -> Samples:
    """Return the seconds of a step's attention to states, in all layers; each round has caches of its own."""
    samples: Samples = {name: [] for name in makers}
    for _ in range(rounds):  # where memory lies changes its speed by some percent
        handles = {}
        for name, make in makers.items():
            cache = filled(make(), states)
            last = [(keys[:, :, -1:], values[:, :, -1:]) for keys, values in states_of(states)]
            handles[name] = [cache.update(*pair, layer) for layer, pair in enumerate(last)]
        queries = [torch.randn(1, heads, 1, keys.shape[3]) for keys, _ in states_of(states)]
        actions = {name: partial(attend, queries, handles[name]) for name in makers}
        for name, seconds in medians(in_turns(actions, 3, lambda name: None)).items():
            samples[name].append(seconds / REPEATS)
    return samples


def attend(queries: list[torch.Tensor], handles: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Attend to each layer with its query, `REPEATS` times."""
    for _ in range(REPEATS):
        for query, (keys, values) in zip(queries, handles, strict=True):
            scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def median_ratio(samples: Samples, name: str, other: str) -> float:
    """Return the median of the ratios of samples of the same rounds."""
    return statistics.median(ours / theirs for ours, theirs in zip(samples[name], samples[other], strict=True))


def main() -> None:
    parser = plain_parser("choice_cost", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model, torch.float32, "cpu")
    assert tokenizer is not None
    ids = english_ids(tokenizer, arguments.tokens)
    config = model.config
    first = QuantizedHybridCache(config, bits=arguments.bits)
    prefill(model, first, ids, arguments.chunk)
    given: dict[str, Callable[[], HybridCache]] = {
        "given": partial(HybridCache, config, codec=first.codecs),
        "rotated": partial(HybridCache, config, codec=minmax(arguments.bits, rotate=True)),
    }
    all_kinds: dict[str, Callable[[], HybridCache]] = {
        **given,
        "chosen": partial(QuantizedHybridCache, config, bits=arguments.bits),
    }
    states = DynamicCache(config=config)
    prefill(model, states, ids, arguments.chunk)
    samples = {
        "prefill": in_turns_with(
            all_kinds, lambda cache: prefill(model, cache, ids, arguments.chunk), arguments.rounds
        ),
        "storing": in_turns_with(given, lambda cache: filled(cache, states), arguments.rounds),
        "attention": attention_samples(given, states, config.num_attention_heads, arguments.rounds),
    }
    pairs = [("prefill", "chosen", "given"), ("prefill", "chosen", "rotated")]
    pairs += [(part, "given", "rotated") for part in ("storing", "attention")]
    ratios = {f"{part}, {name} over {other}": median_ratio(samples[part], name, other) for part, name, other in pairs}
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
