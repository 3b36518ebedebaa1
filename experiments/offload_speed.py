"""
Decode speed of offloaded caches on a GPU: ours against transformers' `DynamicCache(offloading=True)`, taking turns.

The Llama-3.2-1B shape with random weights in bfloat16 and a synthetic prefill. The bus bandwidth of one plain copy from
page-locked memory is measured first, in the same run, and printed before the rest.
"""

import argparse
import json
import statistics
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from experiments import records
from experiments.bandwidth import bus_bandwidth
from experiments.synthetic import fill
from hf_hybrid_cache import OffloadedHybridCache
from hf_hybrid_cache.models import load


@torch.inference_mode()
def decode(model: PreTrainedModel, cache: Cache, num_tokens: int) -> list[float]:
    """Seconds of each of `num_tokens` greedy steps."""
    token = torch.ones(1, 1, dtype=torch.long, device="cuda")
    seconds = []
    for _ in range(num_tokens):
        torch.cuda.synchronize()
        start = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(model: PreTrainedModel, context: int, rounds: int, tokens_per_round: int, bus: float) -> dict[str, Any]:
    """Let both caches decode in turns; raw samples in seconds."""
    assert isinstance(model.config, LlamaConfig)
    ours = OffloadedHybridCache(model.config)
    caches: dict[str, Cache] = {"stock": DynamicCache(config=model.config, offloading=True), "ours": ours}
    for cache in caches.values():
        fill(cache, model.config, context, torch.bfloat16, "cuda")
        decode(model, cache, 3)
    samples: dict[str, list[float]] = {name: [] for name in caches}
    moved = -ours.stats.bytes_to_device
    for _ in range(rounds):
        for name, cache in caches.items():
            samples[name] += decode(model, cache, tokens_per_round)
    moved += ours.stats.bytes_to_device
    speeds = {name: 1 / statistics.median(values) for name, values in samples.items()}
    bus_rate = moved / sum(samples["ours"])
    return {
        "context_tokens": context,
        "prefill": "synthetic",
        "tokens_per_second": speeds,
        "ratio": speeds["ours"] / speeds["stock"],
        "bytes_to_device_per_second": bus_rate,
        "share_of_bus": bus_rate / bus,
        "device_bytes": ours.memory().device_bytes,
        "samples_seconds": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[32_768, 65_536])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens-per-round", type=int, default=8)
    parser.add_argument("--out", type=Path, help="folder of the record (default: results/offload_speed)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This measures copies over the bus of a GPU, and no CUDA device is available.")
    bus = bus_bandwidth()
    print(f"bus: {bus / 1e9:.1f} GB/s for one plain page-locked copy")
    model, _ = load("llama-3.2-1b-random", torch.bfloat16, "cuda")
    print(f"{'context':>8} {'stock tok/s':>12} {'ours tok/s':>11} {'ratio':>6} {'GB/s':>6} {'of bus':>7}")
    cells = []
    for context in arguments.contexts:
        cell = measure(model, context, arguments.rounds, arguments.tokens_per_round, bus)
        stock, ours = (cell["tokens_per_second"][name] for name in ("stock", "ours"))
        bus_use = f"{cell['bytes_to_device_per_second'] / 1e9:>6.1f} {cell['share_of_bus']:>7.0%}"
        print(f"{context:>8,} {stock:>12.2f} {ours:>11.2f} {cell['ratio']:>5.1f}x {bus_use}")
        cells.append(cell)
    path = records.save("offload_speed", {"bus_bytes_per_second": bus, "cells": cells}, arguments.out)
    print(f"record: {path}")
    print(json.dumps({str(cell["context_tokens"]): round(cell["ratio"], 2) for cell in cells}))


if __name__ == "__main__":
    main()
