"""
The error of attention to quantized keys that have a bias, as in some models.

The first and last layers of Qwen2.5-7B have key biases of norm 600 to 900 where its other layers have 20. A bias is
added before the rotary embedding, so that in channels that turn fast it goes round within a block. Here keys have a
content of norm 15, a bias of some norm in four channels of each head and positions somewhere before 131,072; queries
are without a bias, or along that of the keys, and so long that scores spread by one nat: the softmax is not saturated.
Values are independent of each other and have 8 bits, so that the error is that of the keys.

The error of attention's output is that of the cache, prompt and queries through its `update`, against float64 over the
states as they came; it is relative to the length of the output, a mean over queries. Another column has the error of
the scores in nats. What to compare with are keys without a bias.
"""

import json
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from experiments.common import records
from experiments.common.options import plain_parser
from hf_hybrid_cache import HybridCache, minmax

BIASES = (0, 20, 200, 900)
QUERY_BIAS = 5.0  # times sqrt(head_dim), the length of a query's other part
CONTENT, BIASED_CHANNELS, TOKENS, QUERIES = 15.0, 4, 4096, 64
POSITIONS, ROPE_THETA = 131_072, 1e6
# head_dim, KV heads, queries of each.
SHAPES = [(64, 8, 4), (80, 16, 1), (96, 2, 16), (128, 4, 8), (256, 1, 4)]
BITS = (8, 4, 2)
FORMS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "chosen, auto_bits": {"auto_bits": True},
    "rotated": {"rotate": True},
    "plain": {"rotate": False},
}


def rotary(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of halves, as in Llama, of `[..., tokens, head_dim]`."""
    half = states.shape[-1] // 2
    angles = positions[:, None] * ROPE_THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = states.split(half, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def make_states(
    shape: tuple[int, int, int], bias: float, query_has_bias: bool, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, already scaled, keys and values in float64, `[1, heads, tokens, head_dim]`."""
    head_dim, heads, group = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    start = int(torch.randint(POSITIONS - TOKENS, (1,), generator=generator))
    positions = torch.arange(start, start + TOKENS, dtype=torch.float64)
    direction = torch.zeros(heads, 1, head_dim, dtype=torch.float64)
    for head in range(heads):
        direction[head, 0, torch.randperm(head_dim, generator=generator)[:BIASED_CHANNELS]] = normal(BIASED_CHANNELS)
    direction /= direction.norm(dim=-1, keepdim=True)
    keys = rotary(normal(1, heads, TOKENS, head_dim) * CONTENT / head_dim**0.5 + bias * direction, positions)
    queries = normal(1, heads * group, QUERIES, head_dim)
    if query_has_bias:
        queries = queries + QUERY_BIAS * direction.repeat_interleave(group, dim=0)
    queries = rotary(queries, positions[-QUERIES:])
    scores = queries @ keys.repeat_interleave(group, dim=1).mT
    return queries / scores.std(dim=-1, keepdim=True) * head_dim**0.5, keys, normal(1, heads, TOKENS, head_dim)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(queries, keys, values, enable_gqa=True)


@torch.inference_mode()
def measure(shape: tuple[int, int, int], bias: float, query_has_bias: bool) -> dict[str, dict[str, float]]:
    """Measure the error of each cache, by bits and form."""
    head_dim, heads, group = shape
    queries, keys, values = make_states(shape, bias, query_has_bias)
    expected = attend(queries, keys, values)
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=heads * group, num_key_value_heads=heads, head_dim=head_dim
    )
    results = {}
    first, last = slice(TOKENS - QUERIES), slice(TOKENS - QUERIES, None)
    given = keys.float(), values.float()
    for bits in BITS:
        for name, options in FORMS.items():
            cache = HybridCache(config, codec=minmax((bits, 8), **options))
            attend(queries.float(), *cache.update(given[0][:, :, first], given[1][:, :, first], 0))
            out = attend(queries.float(), *cache.update(given[0][:, :, last], given[1][:, :, last], 0)).double()
            layer: Any = cache.layers[0]
            held = layer.keys
            error = (held.double() - keys)[:, :, 64 : TOKENS - 128].repeat_interleave(group, dim=1)
            codec: Any = cache.codecs[0].keys
            results[f"{bits} bits, {name}"] = {
                "output_error": float(((out - expected).norm(dim=-1) / expected.norm(dim=-1)).mean()),
                "score_error_nats": float((queries @ error.mT / head_dim**0.5).square().mean().sqrt()),
                "key_bits": codec.bits,
            }
    return results


def show(title: str, results: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    print(f"{'keys':<28}{'error of the output':>20}{'of a score, nats':>18}{'bits':>6}")
    for name, row in results.items():
        print(f"{name:<28}{row['output_error']:>20.2%}{row['score_error_nats']:>18.4f}{row['key_bits']:>6}")


def main() -> None:
    parser = plain_parser("biased_keys", __doc__)
    parser.add_argument("--biases", type=float, nargs="+", default=BIASES, help="norms")
    parser.add_argument("--smoke", action="store_true", help="one shape, to see that it runs")
    arguments = parser.parse_args()
    cells = []
    for shape in SHAPES[: 1 if arguments.smoke else None]:
        for bias in arguments.biases:
            for query_has_bias in (False, True) if bias else (False,):
                results = measure(shape, bias, query_has_bias)
                heads = f"{shape[1]} KV heads of {shape[0]}, {shape[2]} queries each"
                show(f"{heads}; bias {bias:g}, queries {'with' if query_has_bias else 'without'} it", results)
                cells.append({"shape": shape, "bias": bias, "query_has_bias": query_has_bias, "caches": results})
    record = {"tokens": TOKENS, "content_norm": CONTENT, "biased_channels": BIASED_CHANNELS, "cells": cells}
    print(f"\nrecord: {records.save('biased_keys', record, arguments.out)}")
    worst = {name: max(cell["caches"][name]["output_error"] for cell in cells) for name in cells[0]["caches"]}
    print(json.dumps({"highest_output_error": {name: round(error, 4) for name, error in worst.items()}}))


if __name__ == "__main__":
    main()
