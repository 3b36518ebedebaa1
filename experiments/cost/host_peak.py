"""
Peak host memory of a long decode: the RSS that a cache adds, over the bytes of the keys and values themselves.

Llama-3.2-1B's shape in bfloat16: 130,000 tokens put in as a chunked prefill would, then one token at a time. Each cache
has a process of its own. Transformers' cache copies everything with every token, so it decodes fewer of them here;
its peak is reached with the first.
"""

from pathlib import Path

import psutil
import torch

from experiments.common.harness import Cell, apart, publish
from experiments.common.options import plain_parser
from experiments.common.synthetic import CACHES, fill, llama_1b_config, random_states


def measure(name: str, prefill_tokens: int, new_tokens: int) -> Cell:
    """Fill one cache in this process; bytes of its content, and of the process before and at its peak."""
    config, dtype = llama_1b_config(), torch.bfloat16
    new = random_states(config, 1, dtype)
    cache = CACHES[name](config)
    before = psutil.Process().memory_info().rss
    fill(cache, config, prefill_tokens, dtype)
    fill(cache, config, new_tokens, dtype, chunk=1)
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
    new_tokens = {"ours": arguments.new_tokens, "stock": arguments.stock_new_tokens}
    cells = ((name, apart(measure, name, arguments.prefill_tokens, new)) for name, new in new_tokens.items())
    publish("host_peak", cells, arguments.out)


if __name__ == "__main__":
    main()
