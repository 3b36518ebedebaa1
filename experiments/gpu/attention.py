"""
Attention of one decode step on a GPU: over codes as they are, and torch's over bfloat16, taking turns.

Layers of the Llama-3.2-1B shape with random states, as many as make their keys and values larger than the caches of the
device. Times are of one layer: the new token's update, attention, and launching both, which is what short contexts wait
for. Bytes a second are those of keys and values, or of their codes. A copy within the device, which reads and writes,
says how fast its memory is.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.common import records
from experiments.common.synthetic import kv_bytes, kv_heads, random_states
from experiments.common.timing import medians, samples_in_turns
from experiments.gpu.machine import config_of, device, gpu_parser, parsed, seconds_on_device, synchronize
from experiments.quality.quality_caches import stored_bytes
from hf_hybrid_cache import DynamicHybridCache, QuantizedHybridCache

COPY, STATES = "plain copy", "bfloat16"
BITS: dict[str, int | tuple[int, int] | None] = {"codes-8": 8, "codes-4": 4, "codes-4-2": (4, 2), "codes-2": 2}
_LEAST_BYTES = 2**28  # more than the largest cache of a device that is in use
_STEPS = 8


class Layers:
    """A few layers, attended to one after the other."""

    def __init__(self, num_tokens: int, num_layers: int, bits: int | tuple[int, int] | None, queries: int):
        config = config_of(is_rehearsal=False)
        config.num_hidden_layers = num_layers
        heads, head_dim = config.num_attention_heads, kv_heads(config)[1]
        self._query = torch.randn(1, heads, queries, head_dim, device=device(), dtype=torch.bfloat16)
        self._new = random_states(config, queries, torch.bfloat16, device())
        self._cache = (
            DynamicHybridCache(config, cpu_decode=False)
            if bits is None
            else QuantizedHybridCache(config, bits, cpu_decode=False)
        )
        for layer in range(num_layers):
            keys, values = (random_states(config, num_tokens, torch.bfloat16, device()) for _ in range(2))
            self._cache.update(keys, values, layer)
        self._num_layers = num_layers
        self.attend()
        # The bytes of one layer, tokens in full precision included.
        size = kv_bytes(config, num_tokens, torch.bfloat16) if bits is None else stored_bytes(self._cache)
        self.layer_bytes = size // num_layers

    @torch.inference_mode()
    def attend(self) -> None:
        for layer in range(self._num_layers):
            keys, values = self._cache.update(self._new, self._new, layer)
            scaled_dot_product_attention(self._query, keys, values, enable_gqa=True)

    def seconds(self) -> float:
        """Return the seconds of one layer."""

        def several() -> None:
            for _ in range(_STEPS):
                self.attend()

        return seconds_on_device(several) / _STEPS / self._num_layers


def measure(num_tokens: int, queries: int, rounds: int, is_rehearsal: bool) -> dict[str, Any]:
    config = config_of(is_rehearsal=False)
    config.num_hidden_layers = 1
    layer_bytes = kv_bytes(config, num_tokens, torch.bfloat16)
    # Codes of 2 bits are an eighth and a little.
    num_layers = 2 if is_rehearsal else max(2, -(-8 * _LEAST_BYTES // layer_bytes))
    made = {name: Layers(num_tokens, num_layers, bits, queries) for name, bits in [(STATES, None), *BITS.items()]}
    copied_bytes = layer_bytes if is_rehearsal else max(layer_bytes, 4 * _LEAST_BYTES)
    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)

    def copy_seconds() -> float:
        return seconds_on_device(lambda: [target.copy_(source) for _ in range(_STEPS)]) / _STEPS

    measures: dict[str, Callable[[], float]] = {name: layers.seconds for name, layers in made.items()}
    before: dict[str, Callable[[], object]] = {name: layers.attend for name, layers in made.items()}
    samples = samples_in_turns({COPY: copy_seconds, **measures}, rounds, lambda name: before.get(name, synchronize)())
    seconds = medians(samples)
    copied = 2 * copied_bytes / seconds[COPY]
    rates = {name: made[name].layer_bytes / seconds[name] for name in made}
    return {
        "context_tokens": num_tokens,
        "queries": queries,
        "layers": num_layers,
        "copy_bytes_per_second": copied,
        "layer_bytes": {name: layers.layer_bytes for name, layers in made.items()},
        "median_seconds": seconds,
        "bytes_per_second": rates,
        "share_of_copy": {name: rate / copied for name, rate in rates.items()},
        "ratios": {name: seconds[STATES] / seconds[name] for name in BITS},
        "samples_seconds": samples,
    }


def main() -> None:
    parser = gpu_parser("attention", __doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32_768, 131_072])
    parser.add_argument("--queries", type=int, default=1, help="of each head")
    parser.add_argument("--rounds", type=int, default=10)
    given = parsed(parser)
    cells = []
    print(f"{'context':>8} {'':<12} {'us a layer':>11} {'GB/s':>8} {'of a copy':>10} {'x bfloat16':>11}")
    for context in given.contexts:
        cell = measure(context, given.queries, given.rounds, given.rehearse)
        for name, rate in cell["bytes_per_second"].items():
            times = cell["ratios"].get(name, 1.0)
            row = f"{cell['median_seconds'][name] * 1e6:>11.1f} {rate / 1e9:>8.0f} {cell['share_of_copy'][name]:>10.0%}"
            print(f"{context:>8,} {name:<12} {row} {times:>11.2f}", flush=True)
        cells.append(cell)
        path = records.save("gpu/attention", {"rehearsal": given.rehearse, "cells": cells}, given.out)
    print(f"record: {path}")
    print(json.dumps({str(cell["context_tokens"]): cell["ratios"] for cell in cells}))


if __name__ == "__main__":
    main()
