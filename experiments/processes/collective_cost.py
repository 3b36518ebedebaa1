"""
The cost of merging the attention of several processes, measured on this machine and predicted for others.

Where processes share out a sequence's tokens, each attends to its own, and what they give is merged by log-sum-exp: for
each query head as many numbers as a head is wide, and the log of their sum, once a layer. Measured with gloo: every
process tells every other one all of it (`exchange`, one round), or each merges some of the heads and tells the others
what it has merged (`parts`: two rounds, but bytes that do not grow with the processes); a cache takes the former for
few bytes, the latter for many. `gather` is torch's all_gather, which passes messages on around a ring.

Worked out, and never measured: a token of a model on several machines, from `READ_BYTES_PER_SECOND` and `NETWORKS`.
"""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from experiments.common.harness import Cell, publish, summed_up
from experiments.common.options import plain_parser
from hf_hybrid_cache.models import load_config

SHAPES = {"meta-llama/Llama-3.2-1B": (1, 8), "meta-llama/Llama-3.1-8B": (1, 8)}
PROCESSES = (2, 4)
_WARM_UP = 20


@dataclass(frozen=True)
class Merged:
    """
    The partial results that one layer merges for one token.

    Attributes:
        batch: sequences.
        query_heads: of each.
        head_dim: width of a head; the log of a sum comes with it.
    """

    batch: int
    query_heads: int
    head_dim: int

    @property
    def heads(self) -> int:
        return self.batch * self.query_heads

    @property
    def num_bytes(self) -> int:
        return 4 * self.heads * (self.head_dim + 1)


@dataclass(frozen=True)
class Network:
    """A link between two processes: bytes a second, and the seconds of an empty message."""

    bytes_per_second: float
    latency: float


# The rate of one socket: three quarters of eight channels of DDR4-3200.
READ_BYTES_PER_SECOND = 150e9
# TCP over Ethernet; between sockets of one machine a message is a copy in memory.
NETWORKS = {
    "one machine": Network(10e9, 5e-6),
    "100 Gbit/s": Network(12.5e9, 15e-6),
    "10 Gbit/s": Network(1.25e9, 30e-6),
}


def collective_seconds(way: str, merged: Merged, processes: int, network: Network) -> float:
    """Predict the seconds of one layer, if each process sends and receives one message at a time over its own link."""
    others = processes - 1
    if way == "exchange":
        return network.latency + others * merged.num_bytes / network.bytes_per_second
    if way == "gather":
        return others * (network.latency + merged.num_bytes / network.bytes_per_second)
    # Each sends every other its heads, and gets theirs merged: without the logs of sums.
    out = 4 * merged.heads * merged.head_dim
    return 2 * network.latency + others / processes * (merged.num_bytes + out) / network.bytes_per_second


def predicted(name: str, context: int, processes: int, network: Network, bits: float = 4.5) -> dict[str, float]:
    """Seconds of a token: weights, in every process; its share of keys and values; and merging, the faster way."""
    config = load_config(name).get_text_config(decoder=True)
    heads, kv_heads, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
    head_dim = config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    weights = layers * (2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * inner) + hidden * config.vocab_size
    speed = READ_BYTES_PER_SECOND
    merged = Merged(1, heads, head_dim)
    seconds = {
        "weights": weights * bits / 8 / speed,
        "keys and values": 2 * layers * kv_heads * head_dim * context * bits / 8 / processes / speed,
        "merging": layers * min(collective_seconds(way, merged, processes, network) for way in ("exchange", "parts"))
        if processes > 1
        else 0.0,
    }
    return {**seconds, "tokens_per_second": 1 / sum(seconds.values())}


def predictions(name: str = "meta-llama/Llama-3.1-8B") -> list[dict[str, Any]]:
    """Predict the sockets of one machine, and several machines, with one and eight million tokens."""
    places = [(1, "one machine"), (2, "one machine")]
    places += [(count, network) for count in (8, 64) for network in ("100 Gbit/s", "10 Gbit/s")]
    return [
        {"context": context, "processes": count, "network": network}
        | predicted(name, context, count, NETWORKS[network])
        for context in (2**20, 2**23)
        for count, network in places
    ]


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: a token of each of `predictions`, in milliseconds."""
    lines = [
        "| context | processes | network | tokens/s | weights | keys and values | merging |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        parts = (f"{1e3 * row[part]:.1f} ms" for part in ("weights", "keys and values", "merging"))
        millions, thousands = divmod(row["context"] // 1024, 1024)
        context = f"{millions}M" if millions else f"{thousands}K"
        where = "one socket" if row["processes"] == 1 else row["network"]
        speed = row["tokens_per_second"]
        shown = f"{speed:.2g}" if speed < 10 else f"{speed:.0f}"
        lines.append(f"| {context} | {row['processes']} | {where} | {shown} | {' | '.join(parts)} |")
    return lines


def limits(name: str = "meta-llama/Llama-3.1-8B") -> list[dict[str, Any]]:
    """Find, by context and network, the number of processes whose doubling saves less than a tenth."""
    rows = []
    for context in (2**17, 2**20, 2**23):
        for network in ("100 Gbit/s", "10 Gbit/s"):
            processes = 1
            here, twice = (predicted(name, context, count, NETWORKS[network]) for count in (1, 2))
            while twice["tokens_per_second"] > here["tokens_per_second"] / 0.9:
                processes *= 2
                here, twice = twice, predicted(name, context, 2 * processes, NETWORKS[network])
            rows.append({"context": context, "network": network, "processes": processes, **here})
    return rows


def _exchange(part: torch.Tensor, whole: torch.Tensor) -> None:
    distributed.all_to_all_single(whole, part.expand(whole.shape).contiguous())


def _parts(part: torch.Tensor, whole: torch.Tensor) -> None:
    mine = torch.empty(len(whole), len(part) // len(whole))
    distributed.all_to_all_single(mine, part.view(mine.shape))
    _exchange(mine[0], torch.empty_like(mine))


def _gather(part: torch.Tensor, whole: torch.Tensor) -> None:
    distributed.all_gather(list(whole), part)


WAYS = {"exchange": _exchange, "parts": _parts, "gather": _gather}


def _process(rank: int, processes: int, store: str, sizes: list[int], repeats: int, results: Queue) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    samples: dict[tuple[str, int], list[float]] = {}
    for number in range(_WARM_UP + repeats):
        for size in sizes:  # all take turns
            part, whole = torch.ones(size), torch.empty(processes, size)
            for name, way in WAYS.items():
                distributed.barrier()
                start = time.perf_counter()
                way(part, whole)
                if number >= _WARM_UP:
                    samples.setdefault((name, size), []).append(time.perf_counter() - start)
    if rank == 0:
        results.put(samples)
    distributed.destroy_process_group()


def measured(processes: int, sizes: list[int], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of each way and size, float32 numbers, as the first process has them."""
    context = get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (processes, str(Path(folder) / "store"), sizes, repeats, results)
        started = [context.Process(target=_process, args=(rank, *given)) for rank in range(processes)]
        for each in started:
            each.start()
        samples: dict[tuple[str, int], list[float]] = results.get(timeout=300)
        for each in started:
            each.join()
    return samples


def main() -> None:
    parser = plain_parser("collective_cost", __doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=list(PROCESSES))
    parser.add_argument("--repeats", type=int, default=500)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    merged = {}
    for name, batches in SHAPES.items():
        config = load_config(name).get_text_config(decoder=True)
        for batch in batches:
            merged[f"{name}, batch {batch}"] = Merged(batch, config.num_attention_heads, config.head_dim)

    def cells() -> Iterator[tuple[str, Cell]]:
        for processes in options.processes:
            samples = measured(processes, [each.num_bytes // 4 for each in merged.values()], options.repeats)
            for name, each in merged.items():
                told = {"merged": name, **asdict(each), "num_bytes": each.num_bytes, "processes": processes}
                found = summed_up({way: samples[way, each.num_bytes // 4] for way in WAYS})
                yield f"{name}, {processes}", told | found

    worked_out, most = predictions(), limits()
    print("worked out for Llama-3.1-8B, weights and KV in 4.5 bits a number:")
    print("\n".join(table(worked_out)))
    print("from these on, twice as many processes make a token less than a tenth faster:")
    print("\n".join(table(most)))
    socket = {"read_bytes_per_second": READ_BYTES_PER_SECOND}
    given = {"a socket": socket, **{name: asdict(network) for name, network in NETWORKS.items()}}
    record = {"worked_out": worked_out, "limits": most, "worked_out_from": given}
    publish("collective_cost", cells(), options.out, lambda cell: cell["median_seconds"]["exchange"] * 1e6, **record)


if __name__ == "__main__":
    main()
