"""What it costs that a cache chooses its codecs: a prefill with it, and with the choice given, or none."""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from experiments import records
from experiments.decoding import prefill
from experiments.texts import english_ids
from experiments.timing import in_turns, medians
from hf_hybrid_cache import HybridCache, QuantizedHybridCache
from hf_hybrid_cache.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder of the record (default: in results/choice_cost)")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model, torch.float32, "cpu")
    assert tokenizer is not None
    ids = english_ids(tokenizer, arguments.tokens)
    first = QuantizedHybridCache(model.config, bits=arguments.bits)
    prefill(model, first, ids, arguments.chunk)
    codecs = first.codecs
    del first
    caches: dict[str, Callable[[], HybridCache]] = {
        "given": lambda: HybridCache(model.config, codec=codecs),
        "rotated": lambda: QuantizedHybridCache(model.config, bits=arguments.bits, rotate=True),
        "chosen": lambda: QuantizedHybridCache(model.config, bits=arguments.bits),
    }

    cache = caches["given"]()

    def make(name: str) -> None:
        nonlocal cache
        cache = caches[name]()

    actions = {name: lambda: prefill(model, cache, ids, arguments.chunk) for name in caches}
    samples = in_turns(actions, arguments.rounds, make)
    shares = {
        f"over {other}": statistics.median(
            chosen / seconds - 1 for chosen, seconds in zip(samples["chosen"], samples[other], strict=True)
        )
        for other in ("given", "rotated")
    }
    for name, seconds in medians(samples).items():
        print(f"{arguments.tokens:,} tokens, codecs {name}: {seconds:.2f} s")
    cell = {
        "model": Path(arguments.model).name,
        "tokens": arguments.tokens,
        "chunk": arguments.chunk,
        "bits": arguments.bits,
        "median_seconds": medians(samples),
        "share_of_the_prefill": shares,
        "samples_seconds": samples,
    }
    print(f"record: {records.save('choice_cost', {'cells': [cell]}, arguments.out)}")
    print(json.dumps({name: round(share, 4) for name, share in shares.items()}))


if __name__ == "__main__":
    main()
