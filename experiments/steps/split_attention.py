"""
One decode step of attention to a layer whose ends are in another place than its middle, against all in one place.

One layer of Llama-3.2-1B (8 KV heads with 4 queries each, head_dim 64), on the CPU: the "device" of the ends is host
memory too, so the difference is what parts and their merging cost, and torch's attention to the ends. All ways take
turns. Data is cold and code is warm: before each sample large buffers are read, and then the same call runs over a few
other tokens.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.options import experiment_parser
from experiments.common.synthetic import decode_states, llama_1b_config, random_states
from experiments.common.timing import in_turns, medians
from hf_hybrid_cache import HybridCache, Placement, minmax

WARM_UP_TOKENS = 4096
IN_ONE = 0


def ways(num_tokens: int, bits: int | None, device_tokens: list[int]) -> dict[str, Callable[[], Any]]:
    """Attention to a layer of random states, by the number of tokens on the device, as text."""
    torch.manual_seed(0)
    config = llama_1b_config(num_layers=1)
    keys, values = (random_states(config, num_tokens, torch.bfloat16) for _ in range(2))
    made: dict[str, Callable[[], Any]] = {}
    for number in (IN_ONE, *device_tokens):
        cache = HybridCache(
            config,
            Placement(cpu_decode=True, device_tokens=number),
            codec=None if bits is None else minmax(bits),
        )
        query, our_keys, our_values = decode_states(config, keys, values, cache)
        made[str(number)] = partial(scaled_dot_product_attention, query, our_keys, our_values, enable_gqa=True)
        made[str(number)]()
    return made


def measure(
    num_tokens: int, bits: int | None, device_tokens: list[int], repeats: int, reader: MemoryReader
) -> dict[str, Any]:
    """Raw samples in seconds, by the number of tokens on the device; and their medians against those of none there."""
    layer, other = (ways(tokens, bits, device_tokens) for tokens in (num_tokens, WARM_UP_TOKENS))

    def make_data_cold_and_code_warm(name: str) -> None:
        reader.read()
        other[name]()

    samples = in_turns(layer, repeats, make_data_cold_and_code_warm)
    seconds = medians(samples)
    ratio = {name: each / seconds[str(IN_ONE)] for name, each in seconds.items()}
    return {"tokens": num_tokens, "bits": bits, "median_seconds": seconds, "ratio": ratio, "samples_seconds": samples}


def main() -> None:
    parser = experiment_parser("split_attention", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32_768, 131_072])
    parser.add_argument("--device-tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--repeats", type=int, default=48)
    arguments = parser.parse_args()
    reader = MemoryReader(arguments.buffer_mib)
    read_bandwidth(reader)
    cells, answer = [], {}
    print(f"{'tokens':>8} {'bits':>5} {'on the device':>13} {'time':>10}  of all in one place")
    for num_tokens in arguments.tokens:
        for bits in (None, 4):
            cell = measure(num_tokens, bits, arguments.device_tokens, arguments.repeats, reader)
            cells.append(cell)
            for name, ratio in cell["ratio"].items():
                milliseconds = cell["median_seconds"][name] * 1e3
                print(f"{num_tokens:>8,} {bits or 16:>5} {name:>13} {milliseconds:>7.3f} ms  {ratio:.3f}", flush=True)
            answer[f"{num_tokens}, {bits or 16} bits"] = {name: round(each, 3) for name, each in cell["ratio"].items()}
    print(f"record: {records.save('split_attention', {'cells': cells}, arguments.out)}")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
