"""Decode attention on the CPU by layout of the cache: the head-major and token-major of docs/design.md."""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.common import records

LAYOUTS = ("head_major", "token_major")


def views(states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the states `[1, heads, tokens, dim]` in both layouts."""
    return {"head_major": states, "token_major": states.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)}


def measure(num_tokens: int, dtype: torch.dtype, packed: bool, repeats: int) -> dict[str, Any]:
    """Time one step of a Llama-3.2-1B layer in both layouts in turn; raw samples in seconds."""
    torch.manual_seed(0)
    keys, values = (views(torch.randn(1, 8, num_tokens, 64).to(dtype)) for _ in range(2))
    query = torch.randn(1, 8, 4, 64).to(dtype)
    query = query if packed else query.view(1, 32, 1, 64)
    samples: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for _ in range(repeats + 1):
        for layout in LAYOUTS:
            start = time.perf_counter()
            scaled_dot_product_attention(query, keys[layout], values[layout], enable_gqa=not packed)
            samples[layout].append(time.perf_counter() - start)
    medians = {layout: statistics.median(values[1:]) for layout, values in samples.items()}  # the first is a warm-up
    return {
        "tokens": num_tokens,
        "dtype": str(dtype),
        "queries": "packed" if packed else "enable_gqa",
        "median_seconds": medians,
        "ratio": medians["token_major"] / medians["head_major"],
        "samples_seconds": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 16_384, 65_536])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder of the record (default: results/layout_cost)")
    arguments = parser.parse_args()
    print(f"{'tokens':>7} {'dtype':>15} {'queries':>11} {'head-major':>11} {'token-major':>12} {'ratio':>6}")
    cells = []
    for num_tokens in arguments.tokens:
        for dtype in (torch.bfloat16, torch.float32):
            for packed in (True, False):
                cell = measure(num_tokens, dtype, packed, arguments.repeats)
                head, token = (cell["median_seconds"][layout] * 1e3 for layout in LAYOUTS)
                kind = f"{num_tokens:>7,} {cell['dtype']:>15} {cell['queries']:>11}"
                print(f"{kind} {head:>8.2f} ms {token:>9.2f} ms {cell['ratio']:>5.2f}x")
                cells.append(cell)
    print(f"record: {records.save('layout_cost', {'cells': cells}, arguments.out)}")
    print(json.dumps({"median_ratio": round(statistics.median(cell["ratio"] for cell in cells), 2)}))


if __name__ == "__main__":
    main()
