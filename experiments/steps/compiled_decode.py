"""
Seconds a token of a whole model on the CPU with DynamicHybridCache: as it is, and compiled by `torch.compile`, taking
turns.

Both have a cache of their own with the same random keys and values. What is compiled is compiled before anything is
timed.
"""

from collections.abc import Iterator
from typing import cast

import torch
from transformers import PreTrainedModel

from experiments.common.bandwidth import MemoryReader
from experiments.common.decoding import GreedyDecoder
from experiments.common.harness import Cell, cold_turns, publish
from experiments.common.options import experiment_parser
from experiments.common.synthetic import filled_cache
from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.models import load


def main() -> None:
    parser = experiment_parser("compiled_decode", __doc__)
    parser.add_argument("--model", default="llama-3.2-1b-random")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 8192], help="tokens")
    parser.add_argument("--steps", type=int, default=40, help="tokens timed with each")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    arguments = parser.parse_args()
    model, _ = load(arguments.model, None, "cpu")
    models = {"eager": model, "compiled": cast(PreTrainedModel, torch.compile(model, backend=arguments.backend))}
    reader = MemoryReader(arguments.buffer_mib)

    def cells() -> Iterator[tuple[str, Cell]]:
        for context in arguments.contexts:
            tokens = max(1, context - 2 * (arguments.steps + 3))
            decoders = {
                name: GreedyDecoder(each, filled_cache(DynamicHybridCache, model, tokens))
                for name, each in models.items()
            }
            for decoder in decoders.values():
                for _ in range(4):  # compiles, for the first lengths and then for any
                    decoder.step()
            steps = {name: decoder.step for name, decoder in decoders.items()}
            cell = cold_turns(steps, arguments.steps, reader)
            ratio = cell["median_seconds"]["eager"] / cell["median_seconds"]["compiled"]
            yield str(context), {"context_tokens": context, "ratio": ratio, **cell}

    told = {"model": arguments.model, "dtype": str(model.dtype), "backend": arguments.backend}
    publish("compiled_decode", cells(), arguments.out, **told, steps=arguments.steps)


if __name__ == "__main__":
    main()
