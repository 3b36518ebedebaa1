"""
Peak host memory of a long decode: the RSS that a cache adds, over the bytes of the keys and values themselves.

Llama-3.2-1B's shape in bfloat16: 130,000 tokens put in as a chunked prefill would, then one token at a time. Each cache
has a process of its own. Transformers' cache copies everything with every token, so it decodes fewer of them here;
its peak is reached with the first.
"""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from experiments.common import records
from experiments.common.options import plain_parser
from experiments.common.synthetic import CACHES, fill, llama_1b_config, random_states


def measure(name: str, prefill_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Fill one cache in this process; bytes of its content, and of the process before and at its peak."""
    config, dtype = llama_1b_config(), torch.bfloat16
    new = random_states(config, 1, dtype)
    cache = CACHES[name](config)
    before = psutil.Process().memory_info().rss
    fill(cache, config, prefill_tokens, dtype)
    for _ in range(new_tokens):
        for layer in range(config.num_hidden_layers):
            cache.update(new, new, layer)
    content = sum(
        states.nbytes for layer in range(len(cache)) for states in cache.update(new[:, :, :0], new[:, :, :0], layer)
    )
    # Not ru_maxrss, which starts at what the parent process held.
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return {
        "cache": name,
        "prefill_tokens": prefill_tokens,
        "new_tokens": new_tokens,
        "content_bytes": content,
        "rss_before_bytes": before,
        "rss_peak_bytes": peak,
        "ratio": (peak - before) / content,
    }


def main() -> None:
    parser = plain_parser("host_peak", __doc__)
    parser.add_argument("--prefill-tokens", type=int, default=130_000)
    parser.add_argument("--new-tokens", type=int, default=1072)
    parser.add_argument("--stock-new-tokens", type=int, default=8)
    arguments = parser.parse_args()
    cells = []
    print(f"{'cache':>6} {'new tokens':>11} {'content':>10} {'peak RSS added':>15} {'ratio':>7}")
    for name, new_tokens in (("ours", arguments.new_tokens), ("stock", arguments.stock_new_tokens)):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            cell = process.submit(measure, name, arguments.prefill_tokens, new_tokens).result()
        added = cell["rss_peak_bytes"] - cell["rss_before_bytes"]
        content = cell["content_bytes"]
        print(
            f"{name:>6} {new_tokens:>11,} {content / 2**30:>6.2f} GiB {added / 2**30:>11.2f} GiB {cell['ratio']:>6.3f}x"
        )
        cells.append(cell)
    print(f"record: {records.save('host_peak', {'cells': cells}, arguments.out)}")
    print(json.dumps({cell["cache"]: round(cell["ratio"], 4) for cell in cells}))


if __name__ == "__main__":
    main()
