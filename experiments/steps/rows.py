"""
A pass of several tokens over a pass of one, in one call, after a long context.

Weights have 4 bits, keys and values 8, or as asked for; the cache forgets the tokens of a pass before the next one. All
numbers of tokens take turns, with cold data and warm code.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.common.bandwidth import MemoryReader
from experiments.common.harness import Cell, cold_turns, publish_all
from experiments.common.options import experiment_parser
from experiments.common.synthetic import filled_cache
from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    QuantizedHybridCache,
    fuse_decode,
    get_num_threads,
    quantize_weights,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load

TOKENS = (1, 2, 4, 8, 16)
MODELS = ("smollm2-135m", "llama-3.2-1b-random")


def measure(name: str, num_tokens: int, kv_bits: int, rounds: int, reader: MemoryReader) -> Cell:
    """A cell: raw samples in seconds, and each number of tokens over one."""
    model = load(name, dtype=torch.bfloat16)[0]
    quantize_weights(model, 4)
    fused = fuse_decode(model)
    quantized = partial(QuantizedHybridCache, bits=kv_bits)
    make: Callable[[Any], HybridCache] = DynamicHybridCache if kv_bits == 16 else quantized
    cache = filled_cache(make, model, num_tokens)

    @torch.inference_mode()
    def run(count: int) -> None:
        model(torch.ones(1, count, dtype=torch.long), **cache_argument(cache))
        cache.crop(-count)

    run(1)  # chooses the codec
    reader.forget()
    cell = cold_turns({str(count): partial(run, count) for count in TOKENS}, rounds, reader)
    seconds = cell["median_seconds"]
    return {
        "model": name,
        "stored_tokens": num_tokens,
        "kv_bits": kv_bits,
        "passes_in_one_call": fused.fused_steps,
        "times_one_token": {count: value / seconds["1"] for count, value in seconds.items()},
        **cell,
    }


def main() -> None:
    parser = experiment_parser("rows", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 32_768], help="stored")
    parser.add_argument("--kv-bits", type=int, nargs="+", choices=[16, 8, 4], default=[8])
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    varied = arguments.models, arguments.tokens, arguments.kv_bits
    publish_all("rows", arguments, measure, varied, lambda cell: cell["times_one_token"], threads=get_num_threads())


if __name__ == "__main__":
    main()
