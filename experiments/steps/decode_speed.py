"""
Seconds a token of a whole model on the CPU: transformers' DynamicCache against DynamicHybridCache, taking turns; with
`--bits` against QuantizedHybridCache.

A timed token follows an untimed one of the same cache, as in decoding. The ceiling is the time to read the weights and
the keys and values once, at the read bandwidth of the same run. With `--prefill synthetic` both caches get random keys
and values; with `--prefill real` both read the same English text, and their greedy tokens must be the same, unless one
is quantized.
"""

import json
import sys
from functools import partial
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, PreTrainedModel

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.decoding import GreedyDecoder, prefill, weight_bytes
from experiments.common.options import experiment_parser
from experiments.common.synthetic import CACHES, fill, kv_bytes
from experiments.common.texts import english_ids
from experiments.common.timing import in_turns, medians
from hf_hybrid_cache import HybridCache, QuantizedHybridCache
from hf_hybrid_cache.models import load

CONTEXTS = {"synthetic": [128, 8192, 32_768, 131_072], "real": [8000]}
REAL_STEPS = 64


def default_steps(context: int) -> int:
    """Return the number of steps, fewer where each takes long."""
    return min(40, max(5, 2**19 // context))


def require_memory(model: PreTrainedModel, context: int) -> None:
    """Exit where two caches, and the copies that one of them makes, would not fit."""
    assert isinstance(model.config, LlamaConfig)
    size = kv_bytes(model.config, context, model.dtype)
    needed = 2 * size + 2 * size // model.config.num_hidden_layers
    available = psutil.virtual_memory().available
    if needed > available:
        sys.exit(
            f"Two caches of {context:,} tokens need {needed / 2**30:.1f} GiB and {available / 2**30:.1f} are free: "
            "pass shorter --contexts."
        )


def filled_decoders(
    model: PreTrainedModel, context: int, steps: int, prompt: torch.Tensor | None, bits: int | None
) -> dict[str, GreedyDecoder]:
    """Make decoders after `prompt`; without one, fill them so that the last step brings the context to `context`."""
    assert isinstance(model.config, LlamaConfig)
    decoders = {}
    makers = CACHES | ({"ours": partial(QuantizedHybridCache, bits=bits)} if bits else {})
    for name, make_cache in makers.items():
        cache = make_cache(model.config)
        first_token = 1
        if prompt is None:
            fill(cache, model.config, max(1, context - 2 * (steps + 1)), model.dtype, chunk=8192)
        else:
            first_token = int(prefill(model, cache, prompt).argmax())
        decoders[name] = GreedyDecoder(model, cache, first_token)
    return decoders


def measure(
    model: PreTrainedModel, decoders: dict[str, GreedyDecoder], steps: int, reader: MemoryReader
) -> dict[str, Any]:
    """Let both decode in turns; raw samples in seconds."""
    assert isinstance(model.config, LlamaConfig)
    reader.forget()
    actions = {name: decoder.step for name, decoder in decoders.items()}

    def prepare(name: str) -> None:
        reader.read()
        actions[name]()

    samples = in_turns(actions, steps, prepare)
    seconds, bandwidth = medians(samples), reader.report()
    cache = decoders["ours"].cache
    assert isinstance(cache, HybridCache)
    size = cache.memory().host_bytes
    ceiling = (weight_bytes(model) + size) / bandwidth["bytes_per_second"]
    return {
        "steps": steps,
        "kv_bytes": size,
        "median_seconds": seconds,
        "ratio": seconds["stock"] / seconds["ours"],
        "ceiling_seconds": ceiling,
        "share_of_ceiling": ceiling / seconds["ours"],
        "read_bandwidth": bandwidth,
        "samples_seconds": samples,
    }


def compared_tokens(decoders: dict[str, GreedyDecoder]) -> dict[str, Any]:
    stock, ours = (decoders[name].tokens for name in ("stock", "ours"))
    return {"same_tokens": stock == ours, "tokens": {"stock": stock, "ours": ours}}


def main() -> None:
    parser = experiment_parser("decode_speed", __doc__)
    parser.add_argument("--model", default="llama-3.2-1b-random")
    parser.add_argument("--bits", type=int, choices=[8, 4, 2], help="quantize ours (default: not)")
    parser.add_argument("--prefill", choices=CONTEXTS, default="synthetic")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens (default: by --prefill)")
    parser.add_argument("--steps", type=int, help="tokens timed with each cache (default: fewer at long contexts)")
    arguments = parser.parse_args()
    contexts = arguments.contexts or CONTEXTS[arguments.prefill]
    model, tokenizer = load(arguments.model, None, "cpu")
    assert isinstance(model.config, LlamaConfig)
    if max(contexts) > model.config.max_position_embeddings:
        parser.error(f"{arguments.model} has {model.config.max_position_embeddings:,} positions.")
    reader = MemoryReader(arguments.buffer_mib)
    rate = read_bandwidth(reader)
    weights = weight_bytes(model)
    ours = "QuantizedHybridCache" if arguments.bits else "DynamicHybridCache"
    print(f"{arguments.model}: {model.dtype}, a token reads {weights / 2**20:,.0f} MiB of it")
    print(f"{'context':>8} {'ceiling':>10} {'DynamicCache':>13} {ours:>20} {'ratio':>7}")
    cells = []
    for context in contexts:
        require_memory(model, context)
        ceiling = (weights + kv_bytes(model.config, context, model.dtype)) / rate
        print(f"{context:>8,} {ceiling:>8.3f} s", end="", flush=True)
        prompt, steps = None, arguments.steps or default_steps(context)
        if arguments.prefill == "real":
            assert tokenizer is not None
            prompt, steps = english_ids(tokenizer, context), arguments.steps or REAL_STEPS
        decoders = filled_decoders(model, context, steps, prompt, arguments.bits)
        cell = {"context_tokens": context, **measure(model, decoders, steps, reader)}
        if prompt is not None and not arguments.bits:
            cell |= compared_tokens(decoders)
        del decoders  # before the next ones are filled
        stock, seconds = (cell["median_seconds"][name] for name in ("stock", "ours"))
        print(f" {stock:>11.4f} s {seconds:>18.4f} s {cell['ratio']:>6.1f}x")
        cells.append(cell)
    record = {
        "model": arguments.model,
        "dtype": str(model.dtype),
        "prefill": arguments.prefill,
        "bits": arguments.bits,
        "weight_bytes": weights,
        "cells": cells,
    }
    name = arguments.model.replace("/", "--") + (f"-{arguments.bits}-bits" if arguments.bits else "")
    folder = arguments.out or records.RESULTS / "decode_speed" / name
    print(f"record: {records.save('decode_speed', record, folder)}")
    print(json.dumps({str(cell["context_tokens"]): round(cell["ratio"], 2) for cell in cells}))
    if not all(cell.get("same_tokens", True) for cell in cells):
        sys.exit("The greedy tokens of the two caches differ; the record has both.")


if __name__ == "__main__":
    main()
