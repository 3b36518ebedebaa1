"""The cost of one more token: a one-token `update` of one Llama-3.2-1B layer, ours against `DynamicCache`."""

from functools import partial

import torch

from experiments.common.harness import Cell, apart, publish, turns
from experiments.common.options import plain_parser
from experiments.common.synthetic import CACHES, fill, llama_1b_config, random_states

DTYPE = torch.bfloat16


def measure(num_tokens: int, repeats: int) -> Cell:
    """Time updates of both caches in turns, each cache at `num_tokens` and growing; raw samples in seconds."""
    config = llama_1b_config(num_layers=1)
    caches = {name: make(config) for name, make in CACHES.items()}
    for cache in caches.values():
        fill(cache, config, num_tokens, DTYPE)
    new = random_states(config, 1, DTYPE)
    cell = turns({name: partial(cache.update, new, new, 0) for name, cache in caches.items()}, repeats)
    seconds = cell["median_seconds"]
    return {"tokens": num_tokens, "dtype": str(DTYPE), "ratio": seconds["stock"] / seconds["ours"], **cell}


def main() -> None:
    parser = plain_parser("append_cost", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32_768, 131_072])
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    # Earlier lengths in the same process would change how fast torch.cat gets memory.
    cells = ((str(tokens), apart(measure, tokens, arguments.repeats)) for tokens in arguments.tokens)
    publish("append_cost", cells, arguments.out)


if __name__ == "__main__":
    main()
