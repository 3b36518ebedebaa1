"""
Attention of a prompt on the CPU, ours against torch's: milliseconds, and arithmetic operations a second.

One layer of Llama-3.2-1B (8 KV heads with 4 queries each, head_dim 64), the last queries of a context to all of it,
each to the tokens before it and itself. Ours is what a model gets: attention over the handles of a cache, in full
precision or quantized. Torch gets what transformers gives it, once with `enable_gqa=True`, and once with keys and
values repeated beforehand; the faster of the two counts. All take turns. Quantized ones are compared with torch in
bfloat16.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.common.harness import Cell, publish, turns
from experiments.common.options import plain_parser
from experiments.common.synthetic import llama_1b_config, random_states
from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BITS = {"int8": 8, "int4": 4, "int2": 2}
# Tokens in the context, and how many of them, the last ones, attend.
SIZES = ["4096:4096", "16384:16384", "65536:4096"]


class Layer:
    """
    One layer of random states, and the ways to attend to it.

    Attributes:
        ways: by name, what is timed.
        flops: of one call.
    """

    def __init__(self, name: str, tokens: int, queries: int):
        torch.manual_seed(0)
        config, dtype = llama_1b_config(num_layers=1), DTYPES.get(name, torch.bfloat16)
        keys, values = (random_states(config, tokens, dtype) for _ in range(2))
        heads, head_dim = config.num_attention_heads, keys.shape[3]
        group = heads // keys.shape[1]
        # A token after the other in memory, as projections leave it.
        query = torch.randn(1, queries, heads, head_dim, dtype=dtype).transpose(1, 2)
        past = tokens - queries
        mask = None if past == 0 else torch.ones(queries, tokens, dtype=torch.bool).tril(past)[None, None]
        options: dict[str, Any] = {"is_causal": True} if mask is None else {"attn_mask": mask}
        bits = BITS.get(name)
        cache: HybridCache = QuantizedHybridCache(config, bits) if bits else DynamicHybridCache(config)
        if past:
            cache.update(keys[:, :, :past], values[:, :, :past], 0)
        ours = cache.update(keys[:, :, past:], values[:, :, past:], 0)
        attend: Callable[..., torch.Tensor] = scaled_dot_product_attention
        repeated = [states.repeat_interleave(group, dim=1) for states in (keys, values)]
        self.ways: dict[str, Callable[[], Any]] = {
            "ours": partial(attend, query, *ours, enable_gqa=True, **options),
            "torch_gqa": partial(attend, query, keys, values, enable_gqa=True, **options),
            "torch_repeated": partial(attend, query, *repeated, **options),
        }
        pairs = queries * past + queries * (queries + 1) / 2
        self.flops = 4 * heads * head_dim * pairs


def measure(name: str, tokens: int, queries: int, rounds: int) -> Cell:
    """Raw samples in seconds, and how many times as fast as torch ours is."""
    layer = Layer(name, tokens, queries)
    with torch.inference_mode():
        cell = turns(layer.ways, rounds)
    seconds = cell["median_seconds"]
    return {
        "form": name,
        "tokens": tokens,
        "queries": queries,
        "gflops": {way: layer.flops / each / 1e9 for way, each in seconds.items()},
        "times_as_fast": min(seconds["torch_gqa"], seconds["torch_repeated"]) / seconds["ours"],
        **cell,
    }


def main() -> None:
    parser = plain_parser("prompt_attention", __doc__)
    parser.add_argument("--forms", nargs="+", choices=[*DTYPES, *BITS], default=[*DTYPES, "int8", "int4"])
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="TOKENS:QUERIES")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    def cells() -> Iterator[tuple[str, Cell]]:
        for name in arguments.forms:
            for size in arguments.sizes:
                tokens, queries = (int(number) for number in size.split(":"))
                if name in BITS and tokens == queries:
                    queries = tokens // 2  # the first chunk is attended to before it is quantized
                yield f"{name} {tokens}", measure(name, tokens, queries, arguments.rounds)

    publish("prompt_attention", cells(), arguments.out, lambda cell: cell["times_as_fast"])


if __name__ == "__main__":
    main()
