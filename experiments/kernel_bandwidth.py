"""
One decode step of attention on the CPU, ours against torch's: milliseconds, and bytes of keys and values a second.

One layer of Llama-3.2-1B (8 KV heads with 4 queries each, head_dim 64). Ours is what a model gets: attention over the
handles of a DynamicHybridCache. Torch gets its own best layout, once with the queries packed into the KV heads, and
once with enable_gqa=True, as transformers calls it. Data is cold and code is warm, as in the layers of a model: before
each sample large buffers are read, and then the same call runs over 64 other tokens. The ceiling is a plain sum of as
many bytes, one of the ways that take turns.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments import records
from experiments.bandwidth import MemoryReader, mapped_words, plain_sum, read_bandwidth
from experiments.options import experiment_parser
from experiments.synthetic import decode_states, kv_bytes, llama_1b_config, random_states
from experiments.timing import in_turns, medians

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
OTHERS = ("torch_packed", "torch_enable_gqa")
WAYS = ("plain_sum", "ours", *OTHERS)


class Layer:
    """One layer filled with random states, and the ways to attend to it."""

    def __init__(self, dtype: torch.dtype, num_tokens: int):
        config = llama_1b_config(num_layers=1)
        keys, values = (random_states(config, num_tokens, dtype) for _ in range(2))
        query, our_keys, our_values = decode_states(config, keys, values)
        self.packed = query.view(1, keys.shape[1], -1, keys.shape[-1])
        self.keys, self.values = keys, values
        words = mapped_words(kv_bytes(config, num_tokens, dtype), "2 MiB")
        self.ways: dict[str, Callable[[], Any]] = {
            "plain_sum": partial(plain_sum, words),
            "ours": partial(scaled_dot_product_attention, query, our_keys, our_values, enable_gqa=True),
            "torch_packed": partial(scaled_dot_product_attention, self.packed, keys, values),
            "torch_enable_gqa": partial(scaled_dot_product_attention, query, keys, values, enable_gqa=True),
        }

    def relative_errors(self) -> dict[str, float]:
        """The largest error of each way, over the largest value."""
        exact = scaled_dot_product_attention(self.packed.float(), self.keys.float(), self.values.float())
        results = {name: self.ways[name]().view(exact.shape).float() for name in ("ours", *OTHERS)}
        return {name: float((result - exact).abs().max() / exact.abs().max()) for name, result in results.items()}


def measure(dtype_name: str, num_tokens: int, repeats: int, reader: MemoryReader) -> dict[str, Any]:
    """Check that all ways give the same, then time them in turns; raw samples in seconds."""
    torch.manual_seed(0)
    config, dtype = llama_1b_config(num_layers=1), DTYPES[dtype_name]
    layer, other = Layer(dtype, num_tokens), Layer(dtype, 64)
    errors = layer.relative_errors()
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-4)
    if errors["ours"] > tolerance:
        raise AssertionError(f"{dtype_name}, {num_tokens:,} tokens: off by {errors['ours']:.1e} of the largest value")

    def make_data_cold_and_code_warm(name: str) -> None:
        reader.read()
        other.ways[name]()

    reader.forget()
    samples = in_turns(layer.ways, repeats, make_data_cold_and_code_warm)
    seconds, bandwidth = medians(samples), reader.report()
    size = kv_bytes(config, num_tokens, dtype)
    rates = {name: size / value for name, value in seconds.items()}
    return {
        "dtype": dtype_name,
        "tokens": num_tokens,
        "kv_bytes": size,
        "median_seconds": seconds,
        "kv_bytes_per_second": rates,
        "ratio": {name: seconds[name] / seconds["ours"] for name in OTHERS},
        "share_of_read_bandwidth": seconds["plain_sum"] / seconds["ours"],
        "relative_errors": errors,
        "read_bandwidth": bandwidth,
        "samples_seconds": samples,
    }


def main() -> None:
    parser = experiment_parser("kernel_bandwidth", __doc__)
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384, 65_536, 131_072])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    reader = MemoryReader(arguments.buffer_mib)
    read_bandwidth(reader)
    print(f"{'':>28}" + "".join(f" {name.replace('_', ' ', 1):>16}" for name in WAYS) + " ours is")
    print(f"{'dtype':>8} {'tokens':>8} {'KV':>10}" + f" {'ms':>9} {'GB/s':>6}" * len(WAYS) + " faster than")
    cells, answer = [], {}
    for dtype_name in arguments.dtypes:
        for num_tokens in arguments.tokens:
            size = kv_bytes(llama_1b_config(num_layers=1), num_tokens, DTYPES[dtype_name])
            kind = f"{dtype_name:>8} {num_tokens:>8,} {size / 2**20:>6.1f} MiB"
            print(kind, end="", flush=True)
            cell = measure(dtype_name, num_tokens, arguments.repeats, reader)
            for name in WAYS:
                milliseconds, speed = cell["median_seconds"][name] * 1e3, cell["kv_bytes_per_second"][name] / 1e9
                print(f" {milliseconds:>9.3f} {speed:>6.1f}", end="")
            print(" " + ", ".join(f"{cell['ratio'][name]:.1f}x" for name in OTHERS))
            cells.append(cell)
            ratios = {**cell["ratio"], "share_of_read_bandwidth": cell["share_of_read_bandwidth"]}
            answer[f"{dtype_name} {num_tokens}"] = {name: round(value, 2) for name, value in ratios.items()}
    print(f"record: {records.save('kernel_bandwidth', {'cells': cells}, arguments.out)}")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
