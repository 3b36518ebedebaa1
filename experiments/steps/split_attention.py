"""
One decode step of attention to a layer whose ends are in another place than its middle, against all in one place.

One layer of Llama-3.2-1B (8 KV heads with 4 queries each, head_dim 64), on the CPU: the "device" of the ends is host
memory too, so the difference is what parts and their merging cost, and torch's attention to the ends. All ways take
turns, named by the number of tokens on the device. Data is cold and code is warm, from the same call over a few other
tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.harness import Cell, cold_turns, publish
from experiments.common.options import experiment_parser
from experiments.common.synthetic import decode_states, llama_1b_config, random_states
from hf_hybrid_cache import HybridCache, Placement, minmax

WARM_UP_TOKENS = 4096
IN_ONE = 0


def ways(num_tokens: int, bits: int | None, device_tokens: list[int]) -> dict[str, Callable[[], Any]]:
    """Attention to a layer of random states."""
    torch.manual_seed(0)
    config = llama_1b_config(num_layers=1)
    keys, values = (random_states(config, num_tokens, torch.bfloat16) for _ in range(2))
    made: dict[str, Callable[[], Any]] = {}
    for number in (IN_ONE, *device_tokens):
        place = Placement(cpu_decode=True, device_tokens=number)
        cache = HybridCache(config, place, codec=None if bits is None else minmax(bits))
        states = decode_states(config, keys, values, cache)
        made[str(number)] = partial(scaled_dot_product_attention, *states, enable_gqa=True)
        made[str(number)]()
    return made


def main() -> None:
    parser = experiment_parser("split_attention", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32_768, 131_072])
    parser.add_argument("--device-tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--repeats", type=int, default=48)
    arguments = parser.parse_args()
    reader = MemoryReader(arguments.buffer_mib)
    read_bandwidth(reader)

    def cells() -> Iterator[tuple[str, Cell]]:
        for num_tokens in arguments.tokens:
            for bits in (None, 4):
                layer, other = (ways(tokens, bits, arguments.device_tokens) for tokens in (num_tokens, WARM_UP_TOKENS))
                cell = cold_turns(layer, arguments.repeats, reader, other)
                seconds = cell["median_seconds"]
                ratio = {name: each / seconds[str(IN_ONE)] for name, each in seconds.items()}
                yield f"{num_tokens}, {bits or 16} bits", {"tokens": num_tokens, "bits": bits, "ratio": ratio, **cell}

    publish("split_attention", cells(), arguments.out)


if __name__ == "__main__":
    main()
