"""
A decode step while other processes keep processors busy, with several settings of OpenMP's threads.

A thread of OpenMP that has done its share waits for the others by spinning, on a processor that the slowest may need.
How long is set by GOMP_SPINCOUNT and OMP_WAIT_POLICY, which are read when the library is loaded. So each setting has a
process of its own, with a model in bfloat16 and caches of random keys and values, DynamicCache and DynamicHybridCache;
and with weights, keys and values in 4 bits, by the model's own forward and by `fuse_decode`. They take turns: quiet,
and beside other processes that count in a loop. Those whose turn it is not sleep.
"""

import argparse
import copy
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psutil
import torch

from experiments.common.decoding import GreedyDecoder
from experiments.common.harness import Cell, publish
from experiments.common.options import plain_parser
from experiments.common.synthetic import CACHES, filled_cache
from experiments.common.timing import medians, seconds_of
from experiments.common.told_process import ToldProcess, tell
from hf_hybrid_cache import QuantizedHybridCache, fuse_decode, get_num_threads, quantize_weights
from hf_hybrid_cache.models import load

DTYPE = torch.bfloat16
IN_4_BITS, IN_ONE_CALL = "4 bits", "4 bits, in one call"
DEFAULT, STOCK = "default", "stock"
_CORES = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
_FEWER = str(max(1, _CORES - 1))
SETTINGS: dict[str, dict[str, str]] = {
    DEFAULT: {},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
    "one thread fewer": {"OMP_NUM_THREADS": _FEWER, "HF_HYBRID_CACHE_NUM_THREADS": _FEWER},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    **{f"GOMP_SPINCOUNT={count}": {"GOMP_SPINCOUNT": str(count)} for count in (0, 1000, 10_000, 100_000)},
}
# Variables that each process gets anew, whatever the experiment was started with.
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "HF_HYBRID_CACHE_NUM_THREADS")
# Ends with the experiment, also where that is killed.
_BUSY = """
import os
experiment = os.getppid()
print(flush=True)
while os.getppid() == experiment:
    for _ in range(1_000_000):
        pass
"""
# Seconds of each cache's steps, by setting and number of busy processes.
Samples = Mapping[tuple[str, int], Mapping[str, Sequence[float]]]


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run so many other processes that keep a processor busy, each ready when the block begins."""
    with ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        yield


def measure(decoders: Mapping[str, ToldProcess], busy: Iterable[int], rounds: int, steps: int) -> Samples:
    """Measure all settings in turns, in alternating order, each round with all numbers of busy processes."""
    samples: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(rounds):
        for number in busy:
            with busy_processes(number):
                for name in list(decoders)[:: -1 if turn % 2 else 1]:
                    for cache, seconds in decoders[name].ask(steps).items():
                        samples[name, number][cache] += seconds
    return samples


def cells_of(samples: Samples) -> list[Cell]:
    """A cell for each setting and number of busy processes: medians, and how they compare with others."""
    seconds = {key: medians(of_decoders) for key, of_decoders in samples.items()}

    def ratios(taken: dict[str, float], other: dict[str, float]) -> dict[str, float]:
        return {name: value / other[name] for name, value in taken.items()}

    return [
        {
            "setting": setting,
            "busy_processes": number,
            "median_seconds": taken,
            "times_quiet": ratios(taken, seconds[setting, 0]),
            "times_default": ratios(taken, seconds[DEFAULT, number]),
            "times_stock": ratios(taken, dict.fromkeys(taken, taken[STOCK])),
            "samples_seconds": {name: list(each) for name, each in samples[setting, number].items()},
        }
        for (setting, number), taken in seconds.items()
    ]


def answers(model_name: str, context: int) -> Iterator[Any]:
    """Yield the numbers of threads, and, told a number of steps, seconds of so many of each decoder."""
    model, _ = load(model_name, DTYPE, "cpu")
    quantized = copy.deepcopy(model)
    quantize_weights(quantized, 4)
    in_one_call = copy.deepcopy(quantized)
    fused = fuse_decode(in_one_call)
    pairs: dict[str, Any] = {name: (model, make) for name, make in CACHES.items()}
    for name, each in ((IN_4_BITS, quantized), (IN_ONE_CALL, in_one_call)):
        pairs[name] = each, lambda config: QuantizedHybridCache(config, bits=4)
    decoders = {name: GreedyDecoder(each, filled_cache(make, model, context)) for name, (each, make) in pairs.items()}
    for decoder in decoders.values():
        decoder.step()  # compiles
    if fused.fused_steps != 1:
        raise RuntimeError(f"No step ran in one call: {fused}")
    yield {"torch": torch.get_num_threads(), "kernels": get_num_threads()}
    for line in sys.stdin:
        samples = {}
        for name, decoder in decoders.items():
            decoder.step()
            samples[name] = [seconds_of(decoder.step) for _ in range(int(line))]
        yield samples


def main() -> None:
    parser = plain_parser("busy_machine", __doc__)
    parser.add_argument("--settings", choices=SETTINGS, nargs="+", default=list(SETTINGS), help="besides the default")
    parser.add_argument("--busy", type=int, nargs="+", default=[1, 2], help="numbers of busy processes, besides none")
    parser.add_argument("--model", default="smollm2-135m", help="(default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed in each turn with each cache")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        tell(answers(arguments.model, arguments.context))
        return
    chosen = list(dict.fromkeys([DEFAULT, *arguments.settings]))
    busy = sorted({0, *arguments.busy})
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-m", "experiments.processes.busy_machine", "--answer", *sys.argv[1:]]
    with ExitStack() as stack:
        decoders = {}
        for name in chosen:
            process = ToldProcess(command, environment=inherited | SETTINGS[name])
            decoders[name] = stack.enter_context(closing(process))
            print(f"{name}: threads of {', '.join(f'{place} {number}' for place, number in process.first.items())}")
        threads = {name: process.first for name, process in decoders.items()}
        cells = cells_of(measure(decoders, busy, arguments.rounds, arguments.steps))
    publish(
        "busy_machine",
        ((f"{cell['setting']}, {cell['busy_processes']} busy", cell) for cell in cells),
        arguments.out,
        lambda cell: cell["times_quiet"],
        model=arguments.model,
        dtype=str(DTYPE),
        context_tokens=arguments.context,
        prefill="synthetic",
        rounds=arguments.rounds,
        steps=arguments.steps,
        settings={name: {"environment": SETTINGS[name], "threads": threads[name]} for name in chosen},
    )


if __name__ == "__main__":
    main()
