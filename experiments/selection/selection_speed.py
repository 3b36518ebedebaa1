"""
One decode step of attention on the CPU with top-p page selection, against reading all: milliseconds.

One layer of Llama-3.2-1B (8 KV heads with 4 queries each, head_dim 64). Keys are random, but for pages of 16 tokens,
spread at random, that lie in the direction of the queries so far that they carry the attention: few pages or many, by
construction. The last way has none, so all tokens matter. All ways take turns. Data is cold and code is warm: before
each sample large buffers are read, and then the same call runs over a few other tokens.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.options import experiment_parser
from experiments.common.synthetic import decode_states, llama_1b_config, random_states
from experiments.common.timing import in_turns, medians
from experiments.selection.turned_keys import HIGHER, turned_towards_queries
from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache, Selection

FULL = "bfloat16"
WARM_UP_TOKENS = 1024


class Layer:
    """
    One layer with `share` of its pages in the direction of the queries.

    Attributes:
        selected: caches that read a part, by the name of the same cache that reads all.
        ways: to attend, by name: each cache, and `NAME in part`.
    """

    def __init__(self, num_tokens: int, bits: int, share: float, selection: Selection):
        torch.manual_seed(0)
        config = llama_1b_config(num_layers=1)
        keys, values = (random_states(config, num_tokens, torch.bfloat16) for _ in range(2))
        query = turned_towards_queries(config, keys, share)
        quantized = f"{bits} bits"
        caches: dict[str, HybridCache] = {
            FULL: DynamicHybridCache(config, cpu_decode=True),
            quantized: QuantizedHybridCache(config, bits=bits, cpu_decode=True),
        }
        self.selected: dict[str, HybridCache] = {
            FULL: DynamicHybridCache(config, selection=selection),
            quantized: QuantizedHybridCache(config, bits=bits, selection=selection),
        }
        caches |= {in_part(name): cache for name, cache in self.selected.items()}
        self.ways = {name: self._way(config, cache, keys, values, query) for name, cache in caches.items()}

    @staticmethod
    def _way(
        config: LlamaConfig, cache: HybridCache, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor
    ) -> Callable[[], Any]:
        _, our_keys, our_values = decode_states(config, keys, values, cache)
        way = partial(scaled_dot_product_attention, query, our_keys, our_values, enable_gqa=True)
        way()
        return way


def in_part(name: str) -> str:
    return f"{name} in part"


def measure(
    num_tokens: int, bits: int, shares: list[float], selection: Selection, repeats: int, reader: MemoryReader
) -> dict[str, Any]:
    """Return raw samples in seconds, by way, and the share of the tokens that was read."""
    rows: dict[str, Any] = {}
    for share in shares:
        layer, other = (Layer(tokens, bits, share, selection) for tokens in (num_tokens, WARM_UP_TOKENS))
        for cache in layer.selected.values():
            cache.stats.clear()

        def make_data_cold_and_code_warm(name: str, other: Layer = other) -> None:
            reader.read()
            other.ways[name]()

        samples = in_turns(layer.ways, repeats, make_data_cold_and_code_warm)
        seconds = medians(samples)
        rows[f"{share:.0%}" if share else "all"] = {
            "read": {name: cache.stats.share_read[0] for name, cache in layer.selected.items()},
            "median_seconds": seconds,
            "ratio": {
                name: {way: seconds[way] / seconds[in_part(name)] for way in layer.selected} for name in layer.selected
            },
            "samples_seconds": samples,
        }
    return {"tokens": num_tokens, "rows": rows}


def table(cell: dict[str, Any], bits: int) -> list[str]:
    """Return a Markdown table of the speedup over reading all, at one length."""
    quantized = f"{bits} bits"
    lines = [
        f"| pages that matter | read | bfloat16 in part, against all of it | {quantized} in part, against all of it "
        "| against all in bfloat16 |",
        "|---|---|---|---|---|",
    ]
    for share, row in cell["rows"].items():
        ratio = row["ratio"]
        values = ratio[FULL][FULL], ratio[quantized][quantized], ratio[quantized][FULL]
        lines.append(f"| {share} | {row['read'][FULL]:.1%} | {' | '.join(f'{value:.2f}x' for value in values)} |")
    return lines


def main() -> None:
    parser = experiment_parser("selection_speed", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 131_072])
    parser.add_argument("--bits", type=int, choices=[8, 4, 2], default=4)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.05, 0.1, 0.0], help="of pages that matter")
    parser.add_argument("--top-p", type=float, default=0.99)
    parser.add_argument("--most", type=float, help="share of the tokens from which on all are read; default: as users")
    parser.add_argument("--repeats", type=int, default=32)
    arguments = parser.parse_args()
    selection = Selection(arguments.top_p, arguments.most)
    reader = MemoryReader(arguments.buffer_mib)
    read_bandwidth(reader)
    cells, answer = [], {}
    print(f"{'tokens':>8} {'matter':>7} {'way':>17} {'read':>6} {'time':>10}  faster than reading all")
    for num_tokens in arguments.tokens:
        cell = measure(num_tokens, arguments.bits, arguments.shares, selection, arguments.repeats, reader)
        cells.append(cell)
        for share, row in cell["rows"].items():
            for name, ratio in row["ratio"].items():
                others = ", ".join(f"{other} {value:.2f}x" for other, value in ratio.items())
                milliseconds, read = row["median_seconds"][in_part(name)] * 1e3, row["read"][name]
                print(
                    f"{num_tokens:>8,} {share:>7} {in_part(name):>17} {read:>6.1%} {milliseconds:>7.3f} ms  {others}",
                    flush=True,
                )
                answer[f"{num_tokens}, {share}, {name}"] = {other: round(value, 2) for other, value in ratio.items()}
    record = {"bits": arguments.bits, "mass": arguments.top_p, "most": arguments.most, "higher": HIGHER, "cells": cells}
    print(f"record: {records.save('selection_speed', record, arguments.out)}")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
