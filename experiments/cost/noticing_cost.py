"""
The share of a decode step that a cache takes to notice shared memory, edits, and prompts that do not continue it.

A difference of under one percent is lost in the noise of whole steps, so steps are profiled. A profiler adds to every
call, and these are many short ones: what it says is a bound from above.
"""

import argparse
import cProfile
import json
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.common import records
from experiments.common.decoding import GreedyDecoder, prefill
from experiments.common.timing import seconds_of
from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.models import load

CACHES: dict[str, Callable[[Any], HybridCache]] = {
    "dynamic": DynamicHybridCache,
    "streamed": lambda config: OffloadedHybridCache(config, cpu_decode=False),
    "4 bits": lambda config: QuantizedHybridCache(config, bits=4),
    "4 bits, torch's attention": lambda config: QuantizedHybridCache(config, bits=4, cpu_decode=False),
}
# Keys are file and function.
NOTICING = {
    "tensors that share memory": ("buffer_memory.py", "is_shared"),
    "edits of a layer": ("hybrid_layer.py", "take_edits"),
    "edits of all layers": ("lent_states.py", "take_edits"),
    "prompts": ("callers.py", "length_of_whole_prompt"),
}


def measure(model: Any, cache: HybridCache, context: int, steps: int) -> dict[str, Any]:
    """Calls of each kind of noticing in a step, their share of it under the profiler, and steps without it."""
    prefill(model, cache, torch.arange(1, context + 1)[None])
    decoder = GreedyDecoder(model, cache)
    decoder.step()
    seconds = [seconds_of(decoder.step) for _ in range(steps)]
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        decoder.step()
    profiler.disable()
    calls, shares = dict.fromkeys(NOTICING, 0.0), dict.fromkeys(NOTICING, 0.0)
    stats: Any = pstats.Stats(profiler)
    for (path, _, function), (_, count, _, cumulative, _) in stats.stats.items():
        for name, place in NOTICING.items():
            if (Path(path).name, function) == place:
                calls[name] += count / steps
                shares[name] += cumulative / stats.total_tt
    return {"calls": calls, "shares": shares, "share": sum(shares.values()), "step_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder of the record")
    arguments = parser.parse_args()
    model, _ = load(arguments.model, torch.bfloat16, "cpu")
    cells = {
        name: measure(model, make(model.config), arguments.context, arguments.steps) for name, make in CACHES.items()
    }
    for name, cell in cells.items():
        parts = ", ".join(f"{part} {share:.2%}" for part, share in cell["shares"].items() if share)
        print(f"{name:26} at most {cell['share']:.2%} of a step: {parts}")
    record = {"model": arguments.model, "context": arguments.context, "cells": cells}
    records.save("noticing_cost", record, arguments.out)
    print(json.dumps({name: cell["share"] for name, cell in cells.items()}))


if __name__ == "__main__":
    main()
