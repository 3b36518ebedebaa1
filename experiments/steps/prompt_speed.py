"""
The time to the first token: whole prompts, with transformers' cache and with ours, in turns.

`stock` is transformers' `DynamicCache`, in one piece (as `generate` does by default) or in chunks. "In update" is the
part of it that storing keys and values takes. "8_bits_of_both" has weights of 8 bits, too. Token ids are random.
"""

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from experiments.common import records
from experiments.common.decoding import prefill
from experiments.common.harness import Cell, publish, summed_up
from experiments.common.options import plain_parser
from experiments.common.timing import medians, samples_in_turns
from hf_hybrid_cache import DynamicHybridCache, QuantizedHybridCache, quantize_weights
from hf_hybrid_cache.models import load
from hf_hybrid_cache.planning import default_chunk

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class _Timed:
    """Adds up the time that a cache spends in `update`."""

    seconds = 0.0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        states = super().update(*args, **kwargs)  # type: ignore[misc]
        self.seconds += time.perf_counter() - start
        return states


class TimedStock(_Timed, DynamicCache):
    pass


class TimedOurs(_Timed, DynamicHybridCache):
    pass


class TimedQuantized(_Timed, QuantizedHybridCache):
    pass


MAKERS: dict[str, Callable[[Any], Any]] = {
    "stock": lambda config: TimedStock(config=config),
    "ours": TimedOurs,
    **{f"{bits}_bits": partial(TimedQuantized, bits=bits) for bits in (8, 4, 2)},
}
# The cache of each way, whether its prompt is in one piece, and the bits of the weights if those are quantized.
WAYS: dict[str, tuple[str, bool, int | None]] = {
    "stock": ("stock", False, None),
    "stock_in_one_piece": ("stock", True, None),
    "ours": ("ours", False, None),
    "ours_in_one_piece": ("ours", True, None),
    **{f"{bits}_bits": (f"{bits}_bits", False, None) for bits in (8, 4, 2)},
    **{f"{bits}_bits_of_both": (f"{bits}_bits", False, bits) for bits in (8, 4)},
}


def measure(models: dict[int | None, Any], ways: list[str], num_tokens: int, chunk: int, rounds: int) -> Cell:
    """Raw samples in seconds, by the names of the ways."""
    config = models[None].config
    ids = torch.randint(5, config.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    updates: dict[str, list[float]] = {name: [] for name in ways}

    def seconds_of(name: str) -> float:
        maker, in_one_piece, bits = WAYS[name]
        cache = MAKERS[maker](config)
        start = time.perf_counter()
        prefill(models[bits], cache, ids, num_tokens if in_one_piece else chunk)
        seconds = time.perf_counter() - start
        updates[name].append(cache.seconds)
        return seconds

    samples = samples_in_turns({name: partial(seconds_of, name) for name in ways}, rounds, lambda name: None)
    cell = summed_up(samples)
    seconds = cell["median_seconds"]
    stock = [seconds[name] for name in ways if name.startswith("stock")]
    return {
        "tokens": num_tokens,
        "chunk": chunk,
        # The first round warms up.
        "median_update_seconds": medians({name: values[1:] for name, values in updates.items()}),
        "times_as_fast_as_stock": {name: min(stock) / each for name, each in seconds.items()} if stock else {},
        **cell,
    }


def main() -> None:
    parser = plain_parser("prompt_speed/MODEL/DTYPE", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8000])
    parser.add_argument("--chunk", type=int, default=default_chunk(on_gpu=False))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model, _ = load(arguments.model, DTYPES[arguments.dtype], "cpu")
    models: dict[int | None, Any] = {None: model}
    for bits in {bits for name in arguments.ways if (bits := WAYS[name][2])}:
        models[bits] = copy.deepcopy(model)
        quantize_weights(models[bits], bits)

    def cells() -> Iterator[tuple[str, Cell]]:
        for tokens in arguments.tokens:
            yield str(tokens), measure(models, arguments.ways, tokens, arguments.chunk, arguments.rounds)

    folder = arguments.out or records.RESULTS / "prompt_speed" / arguments.model / arguments.dtype
    told = {"model": arguments.model, "dtype": arguments.dtype}
    publish("prompt_speed", cells(), folder, lambda cell: cell["times_as_fast_as_stock"], **told)


if __name__ == "__main__":
    main()
