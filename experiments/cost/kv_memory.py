"""
The bytes of keys and values of one long context in each format, and the time to store them.

The shape is that of Llama-3.2-1B. Every layer gets random states in one update, as a prefill in one forward pass brings
them, and then one more token, as in decoding. Bytes are those that the cache reports, beside the growth of the resident
memory of the process.
"""

from functools import partial
from typing import Any

import psutil
import torch

from experiments.common.harness import Cell, apart, publish
from experiments.common.options import plain_parser
from experiments.common.synthetic import kv_bytes, llama_1b_config, random_states
from experiments.common.timing import seconds_of
from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache

FORMATS: dict[str, Any] = {
    "bf16": DynamicHybridCache,
    "int8": partial(QuantizedHybridCache, bits=8),
    "int4": partial(QuantizedHybridCache, bits=4),
    "int4-2": partial(QuantizedHybridCache, bits=(4, 2)),
    "int2": partial(QuantizedHybridCache, bits=2),
}


def measure(format_name: str, num_tokens: int, num_layers: int) -> Cell:
    """Store the states in this process, which must do nothing else."""
    torch.manual_seed(0)
    config = llama_1b_config(num_layers)
    states = random_states(config, num_tokens, torch.bfloat16)
    make_cache = FORMATS[format_name]
    for length in (300, 1):  # compiles
        make_cache(config, cpu_decode=True).update(states[:, :, :length], states[:, :, :length], 0)
    before = psutil.Process().memory_info().rss
    cache: HybridCache = make_cache(config, cpu_decode=True)
    store = partial(cache.update, states[:, :, :-1], states[:, :, :-1])
    seconds = [seconds_of(partial(store, layer)) for layer in range(num_layers)]
    for layer in range(num_layers):
        cache.update(states[:, :, -1:], states[:, :, -1:], layer)
    report = cache.memory()
    assert report.num_tokens == num_tokens
    num_bytes = report.host_bytes + report.device_bytes
    return {
        "format": format_name,
        "tokens": num_tokens,
        "bytes": num_bytes,
        "resident_bytes": psutil.Process().memory_info().rss - before,
        "share_of_bfloat16": num_bytes / kv_bytes(config, num_tokens, torch.bfloat16),
        "store_seconds_per_layer": seconds,
    }


def main() -> None:
    parser = plain_parser("kv_memory", __doc__)
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    cells = ((name, apart(measure, name, arguments.tokens, arguments.layers)) for name in arguments.formats)
    publish("kv_memory", cells, arguments.out, lambda cell: cell["share_of_bfloat16"])


if __name__ == "__main__":
    main()
