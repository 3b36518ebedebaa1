"""
The time to the first token: whole prompts, with transformers' cache and with ours, in turns.

`stock` is transformers' `DynamicCache`, in one piece (as `generate` does by default) or in chunks. "In update" is the
part of it that storing keys and values takes. "8_bits_of_both" has weights of 8 bits, too. Token ids are random.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from experiments.common import records
from experiments.common.decoding import prefill
from experiments.common.timing import medians, samples_in_turns
from hf_hybrid_cache import DynamicHybridCache, QuantizedHybridCache, quantize_weights
from hf_hybrid_cache.models import load
from hf_hybrid_cache.planning import default_chunk

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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


class TimedQuantized(_Timed, QuantizedHybridCache):
    pass


WAYS: dict[str, Callable[[Any], Cache]] = {
    "stock": lambda config: TimedStock(config=config),
    "stock_in_one_piece": lambda config: TimedStock(config=config),
    "ours": TimedOurs,
    "ours_in_one_piece": TimedOurs,
    "8_bits": lambda config: TimedQuantized(config, 8),
    "4_bits": lambda config: TimedQuantized(config, 4),
    "2_bits": lambda config: TimedQuantized(config, 2),
    "8_bits_of_both": lambda config: TimedQuantized(config, 8),
    "4_bits_of_both": lambda config: TimedQuantized(config, 4),
}
# Bits of the weights, where they are quantized.
WEIGHT_BITS = {"8_bits_of_both": 8, "4_bits_of_both": 4}


def with_weights(model: Any, ways: list[str]) -> dict[str, Any]:
    """The model, with the weights that each way has."""
    models: dict[int | None, Any] = {None: model}
    for bits in {WEIGHT_BITS[name] for name in ways if name in WEIGHT_BITS}:
        models[bits] = copy.deepcopy(model)
        quantize_weights(models[bits], bits)
    return {name: models[WEIGHT_BITS.get(name)] for name in ways}


def measure(models: dict[str, Any], num_tokens: int, chunk: int, rounds: int) -> dict[str, Any]:
    """Raw samples in seconds, by the names of the ways."""
    ways, model = list(models), next(iter(models.values()))
    ids = torch.randint(5, model.config.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    updates: dict[str, list[float]] = {name: [] for name in ways}

    def seconds_of(name: str) -> float:
        cache: Any = WAYS[name](model.config)
        start = time.perf_counter()
        prefill(models[name], cache, ids, num_tokens if name.endswith("one_piece") else chunk)
        seconds = time.perf_counter() - start
        updates[name].append(cache.seconds)
        return seconds

    samples = samples_in_turns({name: partial(seconds_of, name) for name in ways}, rounds, lambda name: None)
    seconds = medians(samples)
    stock = [seconds[name] for name in ways if name.startswith("stock")]
    return {
        "tokens": num_tokens,
        "chunk": chunk,
        "median_seconds": seconds,
        # The first round warms up.
        "median_update_seconds": medians({name: values[1:] for name, values in updates.items()}),
        "times_as_fast_as_stock": {name: min(stock) / each for name, each in seconds.items()} if stock else {},
        "samples_seconds": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8000])
    parser.add_argument("--chunk", type=int, default=default_chunk(on_gpu=False))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder of the record (default: results/prompt_speed/MODEL/DTYPE)")
    options = parser.parse_args()
    model, _ = load(options.model, DTYPES[options.dtype], "cpu")
    print(f"{'tokens':>7} {'way':>19} {'prefill':>9} {'in update':>10} {'faster':>7}")
    cells = []
    models = with_weights(model, options.ways)
    for num_tokens in options.tokens:
        cell = measure(models, num_tokens, options.chunk, options.rounds)
        for name, seconds in cell["median_seconds"].items():
            faster = cell["times_as_fast_as_stock"].get(name)
            print(
                f"{num_tokens:>7,} {name:>19} {seconds:>7.2f} s {cell['median_update_seconds'][name]:>8.3f} s"
                + ("" if faster is None else f" {faster:>6.2f}x"),
                flush=True,
            )
        cells.append(cell)
    record = {"model": options.model, "dtype": options.dtype, "cells": cells}
    folder = options.out or records.RESULTS / "prompt_speed" / options.model / options.dtype
    print(f"record: {records.save('prompt_speed', record, folder)}")
    print(json.dumps({str(cell["tokens"]): cell["times_as_fast_as_stock"] for cell in cells}))


if __name__ == "__main__":
    main()
