"""
One decode step of one layer with 4-bit keys and values: ours against transformers' `QuantizedCache` with quanto.

A step is the update of the cache by one token, and attention to what it returns. One layer of Llama-3.2-1B in bfloat16.
`DynamicCache` in full precision takes turns with them.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from experiments.common.bandwidth import MemoryReader
from experiments.common.harness import Cell, cold_turns, over, publish
from experiments.common.options import experiment_parser
from experiments.common.synthetic import llama_1b_config, random_states
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
def measure(num_tokens: int, bits: int, repeats: int, reader: MemoryReader) -> Cell:
    torch.manual_seed(0)
    config = llama_1b_config(num_layers=1)
    states = random_states(config, num_tokens, torch.bfloat16)
    state = states[:, :, -1:].clone()
    query = torch.randn(1, config.num_attention_heads, 1, states.shape[-1]).to(torch.bfloat16)
    steps = {}
    for name, make in CACHES.items():
        cache = make(config, bits)
        cache.update(states, states, 0)
        steps[name] = partial(step, cache, query, state)
    cell = cold_turns(steps, repeats, reader)
    return {"tokens": num_tokens, "bits": bits, "ratio": over(cell, "ours"), **cell}


def main() -> None:
    parser = experiment_parser("quantized_step", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--bits", type=int, choices=[4, 2], default=4)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    reader = MemoryReader(arguments.buffer_mib)

    def cells() -> Iterator[tuple[str, Cell]]:
        for tokens in arguments.tokens:
            yield str(tokens), measure(tokens, arguments.bits, arguments.repeats, reader)

    publish("quantized_step", cells(), arguments.out)


if __name__ == "__main__":
    main()
