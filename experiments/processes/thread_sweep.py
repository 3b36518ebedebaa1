"""
Threads: what each number of them gives, from one to all physical cores.

Bytes of keys and values a second of one layer's attention (Llama-3.2-1B shape, bfloat16, 65,536 tokens, cold caches),
and tokens a second of a model with few layers and a small vocabulary at the same context, all of them and all numbers
of threads taking turns. The ceiling of each is the read bandwidth with as many threads.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.decoding import GreedyDecoder
from experiments.common.harness import Cell, publish
from experiments.common.options import experiment_parser
from experiments.common.synthetic import decode_states, filled_cache, kv_bytes, llama_1b_config, random_states
from experiments.common.timing import in_turns, medians
from hf_hybrid_cache import DynamicHybridCache, set_num_threads
from hf_hybrid_cache.models.loading import random_llama

DTYPE = torch.bfloat16


def attention(num_tokens: int) -> partial[torch.Tensor]:
    """Return a function that runs one decode step of attention of one layer, over a filled cache."""
    config = llama_1b_config(num_layers=1)
    keys, values = (random_states(config, num_tokens, DTYPE) for _ in range(2))
    return partial(scaled_dot_product_attention, *decode_states(config, keys, values), enable_gqa=True)


def small_decoder(num_tokens: int) -> GreedyDecoder:
    config = llama_1b_config(num_layers=2)
    config.vocab_size = 4096
    model = random_llama(config, DTYPE)
    return GreedyDecoder(model, filled_cache(DynamicHybridCache, model, num_tokens))


def measure(threads: list[int], num_tokens: int, rounds: int, reader: MemoryReader) -> list[Cell]:
    """Measure all numbers of threads in turns; return a cell for each, with raw samples in seconds."""
    torch.manual_seed(0)
    attend, decoder = attention(num_tokens), small_decoder(num_tokens)
    numbers: dict[str, int] = {}
    actions: dict[str, Callable[[], object]] = {}
    for number in threads:
        numbers |= {f"attention {number}": number, f"decode {number}": number}
        actions |= {f"attention {number}": attend, f"decode {number}": decoder.step}
    ceilings: dict[int, list[float]] = {number: [] for number in threads}

    def use_threads(name: str) -> None:
        set_num_threads(numbers[name])
        torch.set_num_threads(numbers[name])
        ceilings[numbers[name]].append(reader.read())

    samples = in_turns(actions, rounds, use_threads)
    seconds = medians(samples)
    size = kv_bytes(llama_1b_config(num_layers=1), num_tokens, DTYPE)
    return [
        {
            "threads": number,
            "kv_bytes_per_second": size / seconds[f"attention {number}"],
            "decode_tokens_per_second": 1 / seconds[f"decode {number}"],
            "read_bytes_per_second": statistics.median(ceilings[number]),
            "samples_seconds": {kind: samples[f"{kind} {number}"] for kind in ("attention", "decode")},
        }
        for number in threads
    ]


def main() -> None:
    parser = experiment_parser("thread_sweep", __doc__)
    usable = min(records.num_cores(), len(os.sched_getaffinity(0)))
    parser.add_argument("--threads", type=int, nargs="+", default=list(range(1, usable + 1)))
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    reader = MemoryReader(arguments.buffer_mib)
    read_bandwidth(reader)
    cells = measure(arguments.threads, arguments.tokens, arguments.rounds, reader)
    print("Stay on one socket: its cores read the memory of another at a fraction of the speed of their own.")
    publish(
        "thread_sweep",
        ((str(cell["threads"]), cell) for cell in cells),
        arguments.out,
        lambda cell: cell["kv_bytes_per_second"] / 1e9,
        tokens=arguments.tokens,
        dtype=str(DTYPE),
    )


if __name__ == "__main__":
    main()
