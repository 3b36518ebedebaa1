"""
A token whose keys and values are shared out to several processes, against one process with as many threads.

Each process of the group has one thread and one processor, keeps its share of the blocks and attends to it; what they
find is merged once a layer, by messages of gloo. The other process has as many threads as there are processes, and
keeps everything. Where all share one socket there is no bandwidth to gain: what is measured is what sharing costs.
`attention` is that of all layers of Llama-3.2-1B's shape, stored and attended to as a model does; `step` is the whole
model with random weights in bfloat16, which every process reads for itself. Keys and values are random. They take
turns; who waits, sleeps. All of it is repeated with new processes, and ratios are the medians of theirs.
"""

import os
import socket
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import distributed
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from experiments.common.decoding import GreedyDecoder
from experiments.common.harness import Cell, publish
from experiments.common.options import plain_parser
from experiments.common.synthetic import fill, llama_1b_config, random_states
from experiments.common.timing import medians, samples_in_turns, seconds_of
from hf_hybrid_cache import DynamicHybridCache, HybridCache, Placement, minmax, set_num_threads
from hf_hybrid_cache.models.loading import random_llama

DTYPE = torch.bfloat16
# A small vocabulary: with all of Llama 3.2-1B's, weights would take more time than keys and values.
VOCABULARY = 4096
ATTENTION, STEP = "attention", "step"


class Together:
    """
    Processes that attend together, or one alone, ready when this returns; told a number, all do so many tokens.

    Args:
        processes: how many; each keeps a share.
        threads: of each.
        config: of the model.
        bits: of the cache; `None` for full precision.
        context: tokens in it.

    Attributes:
        host_bytes: that the cache of each process holds.
    """

    def __init__(self, processes: int, threads: int, config: LlamaConfig, bits: int | None, context: int):
        start = get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._pipes = []
        for rank in range(processes):
            ours, theirs = start.Pipe()
            given = (theirs, rank, processes, meeting, threads, config, bits, context)
            start.Process(target=_process, args=given, daemon=True).start()
            self._pipes.append(ours)
        self.host_bytes: list[int] = [pipe.recv() for pipe in self._pipes]

    def seconds(self, what: str, tokens: int) -> float:
        """Return the seconds of a token, the median of so many, as the first process measures them."""
        for pipe in self._pipes:
            pipe.send((what, tokens))
        taken: list[float] = [pipe.recv() for pipe in self._pipes]
        return taken[0]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)


def _process(
    pipe: Connection,
    rank: int,
    processes: int,
    meeting: str,
    threads: int,
    config: LlamaConfig,
    bits: int | None,
    context: int,
) -> None:
    torch.set_num_threads(threads)
    set_num_threads(threads)
    group = None
    if processes > 1:
        # Each process has processors of its own, as on a socket; gloo's thread runs there, too.
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
        group = distributed.group.WORLD
    cache: HybridCache
    if bits is None:
        cache = DynamicHybridCache(config, cpu_decode=True, group=group)
    else:
        cache = HybridCache(config, Placement(cpu_decode=True), codec=minmax(bits, rotate=True), group=group)
    fill(cache, config, context, DTYPE, chunk=4096)
    held = cache.memory().host_bytes
    decoder = GreedyDecoder(random_llama(config, DTYPE), cache)
    actions = {ATTENTION: _attention(cache, config), STEP: decoder.step}
    for action in actions.values():
        action()  # compiles
    pipe.send(held)
    while (told := pipe.recv()) is not None:
        what, tokens = told
        if group is not None:
            distributed.barrier()
        actions[what]()
        pipe.send(statistics.median(seconds_of(actions[what]) for _ in range(tokens)))
    if group is not None:
        distributed.destroy_process_group()


def _attention(cache: HybridCache, config: LlamaConfig) -> Callable[[], None]:
    """One token's attention in all layers."""
    torch.manual_seed(1)
    states = random_states(config, 1, DTYPE)
    query = torch.randn(1, config.num_attention_heads, 1, states.shape[3]).to(DTYPE)

    @torch.inference_mode()
    def attend() -> None:
        for layer in range(config.num_hidden_layers):
            keys, values = cache.update(states, states, layer)
            scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return attend


def measure(
    config: LlamaConfig, processes: int, bits: int | None, context: int, starts: int, rounds: int, tokens: int
) -> Cell:
    """A cell of both in turns: medians of each start, and the medians of these."""
    sizes = {"one": (1, processes), "shared": (processes, 1)}  # processes, and threads of each
    samples: dict[str, list[list[float]]] = {f"{what}, {name}": [] for what in (ATTENTION, STEP) for name in sizes}
    for _ in range(starts):
        with ExitStack() as stack:
            sides = {
                name: stack.enter_context(closing(Together(*size, config, bits, context)))
                for name, size in sizes.items()
            }
            measures = {
                f"{what}, {name}": partial(side.seconds, what, tokens)
                for what in (ATTENTION, STEP)
                for name, side in sides.items()
            }
            for name, seconds in samples_in_turns(measures, rounds, lambda name: None).items():
                samples[name].append(seconds)
    of_starts = {name: [statistics.median(each) for each in found] for name, found in samples.items()}
    ratios = {
        what: [shared / one for one, shared in zip(*(of_starts[f"{what}, {name}"] for name in sizes), strict=True)]
        for what in (ATTENTION, STEP)
    }
    held = {name: side.host_bytes for name, side in sides.items()}
    return {
        "processes": processes,
        "bits": bits,
        "context_tokens": context,
        "median_seconds": medians(of_starts),
        "times_one": medians(ratios),
        "times_one_of_starts": ratios,
        "host_bytes": held,
        "share_of_bytes": max(held["shared"]) / held["one"][0],
        "samples_seconds": samples,
    }


def main() -> None:
    parser = plain_parser("shared_attention", __doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 131_072])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4], help="16 is bfloat16")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--starts", type=int, default=3, help="new processes: one is faster than the next all its life")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4, help="timed in each turn")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = llama_1b_config(options.layers)
    config.vocab_size = VOCABULARY
    repeats = {"starts": options.starts, "rounds": options.rounds, "tokens": options.tokens}

    def cells() -> Iterator[tuple[str, Cell]]:
        for processes in options.processes:
            for context in options.contexts:
                for bits in options.bits:
                    width = None if bits == 16 else bits
                    yield f"{bits} bits, {context} tokens", measure(config, processes, width, context, **repeats)

    told = {"layers": options.layers, "vocabulary": VOCABULARY, "dtype": str(DTYPE), "prefill": "synthetic"}
    publish("shared_attention", cells(), options.out, lambda cell: cell["times_one"], **told, **repeats)


if __name__ == "__main__":
    main()
