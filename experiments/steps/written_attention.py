"""
Attention of a decode step that a model writes out itself, ours against torch's: soft caps of Gemma 2, sinks of gpt-oss.

One layer with random weights, and one query to all of its tokens, by transformers' own eager function for these models.
Ours gets the handles of a cache, in full precision or quantized; torch gets the states themselves, so the copy that
`DynamicCache` makes for each token is not counted. All take turns, with cold data and warm code.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from experiments.common.bandwidth import MemoryReader
from experiments.common.harness import Cell, cold_turns, publish_all
from experiments.common.options import experiment_parser
from experiments.common.synthetic import decode_states, llama_1b_config, random_states
from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache

CACHES: dict[str, Callable[[Any], HybridCache]] = {
    "full precision": DynamicHybridCache,
    "8 bits": partial(QuantizedHybridCache, bits=8),
    "4 bits": partial(QuantizedHybridCache, bits=4),
}
# Query heads, KV heads and head_dim of a layer, and what its attention is called with.
SHAPES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "gpt_oss": (64, 8, 64, {"scaling": 64**-0.5}),
    "gemma2": (8, 4, 256, {"scaling": 256**-0.5, "softcap": 50.0}),
}


def measure(family: str, num_tokens: int, rounds: int, reader: MemoryReader) -> Cell:
    """A cell: raw samples in seconds, and how many times as fast as torch ours are."""
    heads, kv_heads, head_dim, options = SHAPES[family]
    dtype = torch.bfloat16
    config = llama_1b_config(num_layers=1)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, kv_heads, head_dim
    torch.manual_seed(0)
    keys, values = (random_states(config, num_tokens, dtype) for _ in range(2))
    eager = import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward
    module = SimpleNamespace(
        num_key_value_groups=heads // kv_heads, head_dim=head_dim, training=False, sinks=torch.randn(heads).to(dtype)
    )
    query = torch.randn(1, heads, 1, head_dim).to(dtype)

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = eager(module, query, keys, values, None, **options)[0]
        return out

    ways = {"torch": partial(attend, keys, values)}
    for name, make in CACHES.items():
        _, *states = decode_states(config, keys, values, make(config))
        ways[name] = partial(attend, *states)
    with torch.inference_mode():
        expected = ways["torch"]().float()
        apart = {name: float((way().float() - expected).norm() / expected.norm()) for name, way in ways.items()}
        cell = cold_turns(ways, rounds, reader)
    seconds = cell["median_seconds"]
    return {
        "family": family,
        "tokens": num_tokens,
        "dtype": str(dtype),
        "times_as_fast": {name: seconds["torch"] / seconds[name] for name in CACHES},
        "apart_from_torch": apart,
        **cell,
    }


def main() -> None:
    parser = experiment_parser("written_attention", __doc__)
    parser.add_argument("--families", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 32_768])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    varied = arguments.families, arguments.tokens
    publish_all("written_attention", arguments, measure, varied, lambda cell: cell["times_as_fast"])


if __name__ == "__main__":
    main()
