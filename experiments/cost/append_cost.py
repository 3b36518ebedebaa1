"""The cost of one more token: a one-token `update` of one Llama-3.2-1B layer, ours against `DynamicCache`."""

import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from experiments.common import records
from experiments.common.options import plain_parser
from experiments.common.synthetic import fill, llama_1b_config, random_states
from hf_hybrid_cache import DynamicHybridCache


def timed_update(cache: Cache, states: torch.Tensor) -> float:
    """Seconds of one `update` of layer 0."""
    start = time.perf_counter()
    cache.update(states, states, 0)
    return time.perf_counter() - start


def measure(num_tokens: int, repeats: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Time updates of both caches in turn, each cache at `num_tokens` and growing; raw samples in seconds."""
    config = llama_1b_config(num_layers=1)
    caches = {"stock": DynamicCache(config=config), "ours": DynamicHybridCache(config)}
    for cache in caches.values():
        fill(cache, config, num_tokens, dtype)
    new = random_states(config, 1, dtype)
    for cache in caches.values():
        timed_update(cache, new)
    samples: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(repeats):
        for name, cache in caches.items():
            samples[name].append(timed_update(cache, new))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "tokens": num_tokens,
        "dtype": str(dtype),
        "median_seconds": medians,
        "ratio": medians["stock"] / medians["ours"],
        "samples_seconds": samples,
    }


def main() -> None:
    parser = plain_parser("append_cost", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32_768, 131_072])
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    print(f"{'tokens':>8} {'DynamicCache':>14} {'DynamicHybridCache':>19} {'ratio':>8}")
    cells = []
    # A process for each length: what earlier lengths left in the allocator changes how fast torch.cat gets memory.
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    for num_tokens in arguments.tokens:
        cell = pool.submit(measure, num_tokens, arguments.repeats).result()
        stock, ours = (cell["median_seconds"][name] * 1e6 for name in ("stock", "ours"))
        print(f"{num_tokens:>8,} {stock:>11,.0f} us {ours:>16,.1f} us {cell['ratio']:>7,.0f}x")
        cells.append(cell)
    pool.shutdown()
    path = records.save("append_cost", {"cells": cells}, arguments.out)
    print(f"record: {path}")
    print(json.dumps({str(cell["tokens"]): round(cell["ratio"], 1) for cell in cells}))


if __name__ == "__main__":
    main()
