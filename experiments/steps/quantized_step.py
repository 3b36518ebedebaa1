"""
One decode step of one layer with 4-bit keys and values: ours against transformers' `QuantizedCache` with quanto.

A step is the update of the cache by one token, and attention to what it returns. One layer of Llama-3.2-1B in bfloat16.
`DynamicCache` in full precision takes turns with them.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from experiments.common import records
from experiments.common.bandwidth import MemoryReader
from experiments.common.options import experiment_parser
from experiments.common.synthetic import llama_1b_config, random_states
from experiments.common.timing import in_turns, medians
from hf_hybrid_cache import QuantizedHybridCache

CACHES: dict[str, Callable[..., Cache]] = {
    "ours": lambda config, bits: QuantizedHybridCache(config, bits, cpu_decode=True),
    "quanto": lambda config, bits: QuantizedCache("quanto", config, nbits=bits),
    "stock": lambda config, bits: DynamicCache(config=config),
}


def step(cache: Cache, query: torch.Tensor, state: torch.Tensor) -> None:
    keys, values = cache.update(state, state, 0)
    scaled_dot_product_attention(query, keys, values, enable_gqa=True)


@torch.inference_mode()
def measure(num_tokens: int, bits: int, repeats: int, reader: MemoryReader) -> dict[str, Any]:
    torch.manual_seed(0)
    config = llama_1b_config(num_layers=1)
    states = random_states(config, num_tokens, torch.bfloat16)
    state = states[:, :, -1:].clone()
    query = torch.randn(1, config.num_attention_heads, 1, states.shape[-1]).to(torch.bfloat16)
    actions = {}
    for name, make in CACHES.items():
        cache = make(config, bits)
        cache.update(states, states, 0)
        actions[name] = partial(step, cache, query, state)

    def prepare(name: str) -> None:
        reader.read()
        actions[name]()  # code is warm; its data is not, after as much as this of the others

    samples = in_turns(actions, repeats, prepare)
    seconds = medians(samples)
    ratio = {name: value / seconds["ours"] for name, value in seconds.items() if name != "ours"}
    return {"tokens": num_tokens, "bits": bits, "median_seconds": seconds, "ratio": ratio, "samples_seconds": samples}


def main() -> None:
    parser = experiment_parser("quantized_step", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--bits", type=int, choices=[4, 2], default=4)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    reader = MemoryReader(arguments.buffer_mib)
    print(f"{'tokens':>8} {'ours':>11} {'quanto':>11} {'DynamicCache':>13}   ours is faster than")
    cells = []
    for num_tokens in arguments.tokens:
        cell = measure(num_tokens, arguments.bits, arguments.repeats, reader)
        cells.append(cell)
        ours, quanto, stock = (cell["median_seconds"][name] * 1e3 for name in ("ours", "quanto", "stock"))
        ratios = ", ".join(f"{name} {value:.1f}x" for name, value in cell["ratio"].items())
        print(f"{num_tokens:>8,} {ours:>8.3f} ms {quanto:>8.2f} ms {stock:>10.2f} ms   {ratios}", flush=True)
    print(f"record: {records.save('quantized_step', {'cells': cells}, arguments.out)}")
    print(json.dumps({str(cell["tokens"]): {name: round(r, 1) for name, r in cell["ratio"].items()} for cell in cells}))


if __name__ == "__main__":
    main()
