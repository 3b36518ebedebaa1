"""
One decode step of attention on the CPU, ours against torch's: milliseconds, and bytes of keys and values a second.

One layer of Llama-3.2-1B (8 KV heads with 4 queries each, head_dim 64). Ours is what a model gets: attention over the
handles of a DynamicHybridCache. Torch gets its own best layout, once with the queries packed into the KV heads, and
once with enable_gqa=True, as transformers calls it. Everything is cold: before each sample a plain sum runs over
buffers larger than the caches, because a layer of a model is evicted by the other layers. The sum is the ceiling.
"""

import json
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments import records
from experiments.bandwidth import MemoryReader, read_bandwidth
from experiments.options import experiment_parser
from experiments.synthetic import decode_states, kv_bytes, llama_1b_config, random_states
from experiments.timing import in_turns, medians

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
OTHERS = ("torch_packed", "torch_enable_gqa")


def relative_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error over the largest value."""
    return float((output.float() - exact).abs().max() / exact.abs().max())


def measure(dtype_name: str, num_tokens: int, repeats: int, reader: MemoryReader) -> dict[str, Any]:
    """Check that all ways give the same, then time them in turns; raw samples in seconds."""
    torch.manual_seed(0)
    config, dtype = llama_1b_config(num_layers=1), DTYPES[dtype_name]
    keys, values = (random_states(config, num_tokens, dtype) for _ in range(2))
    query, our_keys, our_values = decode_states(config, keys, values)
    packed = query.view(1, keys.shape[1], -1, keys.shape[-1])
    ways = {
        "ours": partial(scaled_dot_product_attention, query, our_keys, our_values, enable_gqa=True),
        "torch_packed": partial(scaled_dot_product_attention, packed, keys, values),
        "torch_enable_gqa": partial(scaled_dot_product_attention, query, keys, values, enable_gqa=True),
    }
    exact = scaled_dot_product_attention(packed.float(), keys.float(), values.float()).view(query.shape)
    errors = {name: relative_error(attend().view(query.shape), exact) for name, attend in ways.items()}
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-4)
    if errors["ours"] > tolerance:
        raise AssertionError(f"{dtype_name}, {num_tokens:,} tokens: off by {errors['ours']:.1e} of the largest value")

    reader.forget()
    samples = in_turns(ways, repeats, before=lambda name: reader.read())
    seconds, bandwidth = medians(samples), reader.report()
    size = kv_bytes(config, num_tokens, dtype)
    rates = {name: size / value for name, value in seconds.items()}
    return {
        "dtype": dtype_name,
        "tokens": num_tokens,
        "kv_bytes": size,
        "caches": "cold",
        "median_seconds": seconds,
        "kv_bytes_per_second": rates,
        "ratio": {name: seconds[name] / seconds["ours"] for name in OTHERS},
        "share_of_read_bandwidth": rates["ours"] / bandwidth["bytes_per_second"],
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
    rate = read_bandwidth(reader)
    print(f"{'':>8} {'':>8} {'':>10} {'ceiling':>8} {'ours':>16} {'torch packed':>16} {'torch enable_gqa':>16} ours is")
    print(f"{'dtype':>8} {'tokens':>8} {'KV':>10} {'ms':>8}" + f" {'ms':>9} {'GB/s':>6}" * 3 + " faster than")
    cells, answer = [], {}
    for dtype_name in arguments.dtypes:
        for num_tokens in arguments.tokens:
            size = kv_bytes(llama_1b_config(num_layers=1), num_tokens, DTYPES[dtype_name])
            kind = f"{dtype_name:>8} {num_tokens:>8,} {size / 2**20:>6.1f} MiB {size / rate * 1e3:>8.3f}"
            print(kind, end="", flush=True)
            cell = measure(dtype_name, num_tokens, arguments.repeats, reader)
            for name in ("ours", *OTHERS):
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
