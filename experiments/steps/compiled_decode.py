"""
Seconds a token of a whole model on the CPU with DynamicHybridCache: as it is, and compiled by `torch.compile`, taking
turns.

Both have a cache of their own with the same random keys and values. What is compiled is compiled before anything is
timed.
"""

import json
from typing import cast

import torch
from transformers import LlamaConfig, PreTrainedModel

from experiments.common import records
from experiments.common.bandwidth import MemoryReader
from experiments.common.decoding import GreedyDecoder
from experiments.common.options import experiment_parser
from experiments.common.synthetic import fill
from experiments.common.timing import in_turns, medians
from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.models import load

CONTEXTS = [128, 8192]


def main() -> None:
    parser = experiment_parser("compiled_decode", __doc__)
    parser.add_argument("--model", default="llama-3.2-1b-random")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens")
    parser.add_argument("--steps", type=int, default=40, help="tokens timed with each")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    arguments = parser.parse_args()
    model, _ = load(arguments.model, None, "cpu")
    assert isinstance(model.config, LlamaConfig)
    models = {"eager": model, "compiled": cast(PreTrainedModel, torch.compile(model, backend=arguments.backend))}
    reader = MemoryReader(arguments.buffer_mib)
    print(f"{'context':>8} {'eager':>10} {'compiled':>10} {'ratio':>7}")
    cells = []
    for context in arguments.contexts:
        decoders = {}
        for name, each in models.items():
            cache = DynamicHybridCache(model.config)
            fill(cache, model.config, max(1, context - 2 * (arguments.steps + 3)), model.dtype, chunk=8192)
            decoders[name] = GreedyDecoder(each, cache, first_token=1)
            for _ in range(4):  # compiles, for the first lengths and then for any
                decoders[name].step()
        actions = {name: decoder.step for name, decoder in decoders.items()}

        def prepare(name: str, actions: dict = actions) -> None:
            reader.read()
            actions[name]()

        samples = in_turns(actions, arguments.steps, prepare)
        seconds = medians(samples)
        ratio = seconds["eager"] / seconds["compiled"]
        print(f"{context:>8,} {seconds['eager']:>8.4f} s {seconds['compiled']:>8.4f} s {ratio:>6.2f}x")
        cells.append({"context_tokens": context, "median_seconds": seconds, "ratio": ratio, "samples_seconds": samples})
        del decoders, actions
    record = {
        "model": arguments.model,
        "dtype": str(model.dtype),
        "backend": arguments.backend,
        "steps": arguments.steps,
        "cells": cells,
    }
    print(f"record: {records.save('compiled_decode', record, arguments.out)}")
    print(json.dumps({str(cell["context_tokens"]): round(cell["ratio"], 3) for cell in cells}))


if __name__ == "__main__":
    main()
