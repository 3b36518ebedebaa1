"""
One decode step of attention on the CPU, ours against torch's: milliseconds, and bytes of keys and values a second.

One layer of Llama-3.2-1B (8 KV heads with 4 queries each, head_dim 64). Ours is what a model gets: attention over the
handles of a cache, of full precision or quantized; "portable" is the quantized one without integer dot products. Torch
gets its own best layout, once with the queries packed into the KV heads, and once with enable_gqa=True, as transformers
calls it. All formats and ways take turns. Data is cold and code is warm, as in the layers of a model: before each
sample large buffers are read, and then the same call runs over a few other tokens. The ceiling is a plain sum of as
many bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.common.bandwidth import MemoryReader, mapped_words, plain_sum, read_bandwidth
from experiments.common.harness import Cell, cold_turns, finish, rounded, table
from experiments.common.options import experiment_parser
from experiments.common.synthetic import decode_states, llama_1b_config, random_states
from hf_hybrid_cache import DynamicHybridCache, QuantizedHybridCache
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels, uses_integer_kernels

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BITS = {"int8": 8, "int4": 4, "int2": 2}
FORMATS = [*DTYPES, *BITS]
# Tokens in the call that warms up the code: some of them are quantized.
WARM_UP_TOKENS = 320


class Layer:
    """
    One layer of random states in one format, and the ways to attend to it.

    Attributes:
        num_bytes: that hold the states.
        ways: by name, what is timed.
    """

    def __init__(self, format_name: str, num_tokens: int):
        torch.manual_seed(0)
        config, dtype = llama_1b_config(num_layers=1), DTYPES.get(format_name, torch.bfloat16)
        keys, values = (random_states(config, num_tokens, dtype) for _ in range(2))
        bits = BITS.get(format_name)
        make_cache = partial(QuantizedHybridCache, bits=bits) if bits else DynamicHybridCache
        cache = make_cache(config, cpu_decode=True)
        query, our_keys, our_values = decode_states(config, keys, values, cache)
        packed = query.view(1, keys.shape[1], -1, keys.shape[-1])
        ours = partial(scaled_dot_product_attention, query, our_keys, our_values, enable_gqa=True)
        ours()  # states that wait for a query are quantized
        self.num_bytes = cache.memory().host_bytes
        words = mapped_words(self.num_bytes // 8 * 8, "2 MiB")
        self.ways: dict[str, Callable[[], Any]] = {"plain_sum": partial(plain_sum, words), "ours": ours}
        if not bits:
            self.ways["torch_packed"] = partial(scaled_dot_product_attention, packed, keys, values)
            self.ways["torch_enable_gqa"] = partial(scaled_dot_product_attention, query, keys, values, enable_gqa=True)
        elif uses_integer_kernels():
            self.ways["portable"] = partial(without_integers, ours)


def without_integers(attend: Callable[[], Any]) -> Any:
    set_integer_kernels(False)
    try:
        return attend()
    finally:
        set_integer_kernels(None)


def measure(formats: list[str], num_tokens: int, repeats: int, reader: MemoryReader) -> Cell:
    """Time all ways in turns; raw samples in seconds, by "format way"."""
    layers, others = ({name: Layer(name, tokens) for name in formats} for tokens in (num_tokens, WARM_UP_TOKENS))

    def ways(of: dict[str, Layer]) -> dict[str, Callable[[], Any]]:
        return {f"{name} {way}": action for name, layer in of.items() for way, action in layer.ways.items()}

    reader.forget()
    timed = cold_turns(ways(layers), repeats, reader, ways(others))
    seconds = timed["median_seconds"]
    return {
        "tokens": num_tokens,
        "formats": {name: describe(name, layer, seconds) for name, layer in layers.items()},
        "read_bandwidth": reader.report(),
        "samples_seconds": timed["samples_seconds"],
    }


def describe(name: str, layer: Layer, seconds: dict[str, float]) -> Cell:
    """Summarize one format: `ratio` has the time of each other way over ours."""
    own = {way: seconds[f"{name} {way}"] for way in layer.ways}
    ratio = {way: value / own["ours"] for way, value in own.items() if way not in ("ours", "plain_sum")}
    if name != "bf16" and "bf16 ours" in seconds:
        ratio["bf16"] = seconds["bf16 ours"] / own["ours"]
    return {
        "kv_bytes": layer.num_bytes,
        "median_seconds": own,
        "kv_bytes_per_second": layer.num_bytes / own["ours"],
        "share_of_read_bandwidth": own["plain_sum"] / own["ours"],
        "ratio": ratio,
    }


def main() -> None:
    parser = experiment_parser("kernel_bandwidth", __doc__)
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=FORMATS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384, 65_536, 131_072])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    reader = MemoryReader(arguments.buffer_mib)
    read_bandwidth(reader)
    cells, answers = [], {}
    for num_tokens in arguments.tokens:
        cells.append(measure(arguments.formats, num_tokens, arguments.repeats, reader))
        for name, result in cells[-1]["formats"].items():
            print(table(f"{name} {num_tokens}", result), flush=True)
            answers[f"{name} {num_tokens}"] = rounded(result["ratio"])
    finish("kernel_bandwidth", {"cells": cells}, answers, arguments.out)


if __name__ == "__main__":
    main()
