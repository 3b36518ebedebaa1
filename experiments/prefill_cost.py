"""What storing a prompt costs: a chunked prefill of SmolLM2-135M, and the part of it spent in `update`."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from experiments import records
from experiments.decoding import prefill
from experiments.timing import seconds_of
from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.models import load


class _Timed:
    """Adds up the time that a cache spends in `update`."""

    seconds = 0.0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        states = super().update(*args, **kwargs)  # type: ignore[misc]
        self.seconds += time.perf_counter() - start
        return states


class TimedStock(_Timed, DynamicCache):
    pass


class TimedOurs(_Timed, DynamicHybridCache):
    pass


CACHES: dict[str, Callable[[Any], Any]] = {"stock": lambda config: TimedStock(config=config), "ours": TimedOurs}


def measure(num_tokens: int, chunk: int, rounds: int) -> dict[str, Any]:
    """Let both caches take turns, in an order that alternates; raw samples in seconds."""
    model, _ = load("smollm2-135m", torch.float32, "cpu")
    ids = torch.randint(5, 40_000, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    prefill(model, DynamicCache(config=model.config), ids, chunk)
    samples: dict[str, list[float]] = {name: [] for name in CACHES}
    updates: dict[str, list[float]] = {name: [] for name in CACHES}
    for turn in range(rounds):
        for name in list(CACHES)[:: 1 if turn % 2 else -1]:
            cache = CACHES[name](model.config)
            samples[name].append(seconds_of(partial(prefill, model, cache, ids, chunk)))
            updates[name].append(cache.seconds)
            del cache
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "model": "smollm2-135m",
        "tokens": num_tokens,
        "chunk": chunk,
        "median_seconds": medians,
        "median_update_seconds": {name: statistics.median(values) for name, values in updates.items()},
        "ratio": medians["ours"] / medians["stock"],
        "samples_seconds": samples,
        "samples_update_seconds": updates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[3000])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="folder of the record (default: results/prefill_cost)")
    arguments = parser.parse_args()
    print(f"{'tokens':>7} {'cache':>6} {'prefill':>9} {'in update':>10}")
    cells = []
    for num_tokens in arguments.tokens:
        cell = measure(num_tokens, arguments.chunk, arguments.rounds)
        for name in CACHES:
            seconds = f"{cell['median_seconds'][name]:>7.2f} s {cell['median_update_seconds'][name]:>8.3f} s"
            print(f"{num_tokens:>7,} {name:>6} {seconds}")
        cells.append(cell)
    print(f"record: {records.save('prefill_cost', {'cells': cells}, arguments.out)}")
    print(json.dumps({str(cell["tokens"]): round(cell["ratio"], 3) for cell in cells}))


if __name__ == "__main__":
    main()
