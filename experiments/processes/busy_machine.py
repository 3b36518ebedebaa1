"""
A decode step while other processes keep processors busy, with several settings of OpenMP's threads.

A thread of OpenMP that has done its share waits for the others by spinning, on a processor that the slowest may need.
How long is set by GOMP_SPINCOUNT and OMP_WAIT_POLICY, which are read when the library is loaded. So each setting has a
process of its own, with a model, or a few layers of Llama-3.2-1B's shape and a small vocabulary, in bfloat16, caches of
random keys and values, DynamicCache and DynamicHybridCache; and with weights, keys and values in 4 bits, by the model's
own forward and by `fuse_decode`. They take turns: quiet, and beside other processes that count in a loop. Those whose
turn it is not sleep.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psutil
import torch

from experiments.common.decoding import GreedyDecoder
from experiments.common.harness import finish
from experiments.common.options import plain_parser
from experiments.common.synthetic import CACHES, filled_cache, llama_1b_config
from experiments.common.timing import seconds_of
from experiments.common.told_process import ToldProcess, tell
from hf_hybrid_cache import QuantizedHybridCache, fuse_decode, get_num_threads, quantize_weights
from hf_hybrid_cache.models import load
from hf_hybrid_cache.models.random_weights import random_llama

DTYPE = torch.bfloat16
# A small vocabulary: with all of Llama 3.2-1B's, the output layer would take more time than a few layers.
VOCABULARY = 4096
LLAMA_LAYERS = "llama-layers"
IN_4_BITS, IN_ONE_CALL = "4 bits", "4 bits, in one call"
# The decoders: each cache with the model's own weights, and ours with weights, keys and values quantized.
DECODERS = (*CACHES, IN_4_BITS, IN_ONE_CALL)
DEFAULT = "default"
# The baseline among `DECODERS`, which takes turns with the others in the same process.
STOCK = "stock"
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


def cells_of(samples: Samples) -> list[dict[str, Any]]:
    """A cell for each setting and number of busy processes: medians, and how they compare with others."""
    seconds = {
        key: {cache: statistics.median(taken) for cache, taken in of_caches.items()}
        for key, of_caches in samples.items()
    }

    def ratios(key: tuple[str, int], other: tuple[str, int]) -> dict[str, float]:
        return {cache: seconds[key][cache] / seconds[other][cache] for cache in seconds[key]}

    return [
        {
            "setting": setting,
            "busy_processes": number,
            "median_seconds": seconds[setting, number],
            "times_quiet": ratios((setting, number), (setting, 0)),
            "times_default": ratios((setting, number), (DEFAULT, number)),
            "times_stock": {cache: taken / of_caches[STOCK] for cache, taken in of_caches.items()},
            "samples_seconds": {cache: list(taken) for cache, taken in samples[setting, number].items()},
        }
        for (setting, number), of_caches in seconds.items()
    ]


def table(cells: Sequence[Mapping[str, Any]], busy: Sequence[int]) -> str:
    """Milliseconds of a step, a row for each setting, in columns by cache and number of busy processes."""
    columns = [(cache, number) for cache in cells[0]["median_seconds"] for number in busy]
    titles = [f"{cache}, {number} busy" for cache, number in columns]
    width = max(15, 2 + max(map(len, titles)))
    lines = ["ms a step" + " " * 16 + "".join(f"{title:>{width}}" for title in titles)]
    for setting in dict.fromkeys(cell["setting"] for cell in cells):
        of_setting = {cell["busy_processes"]: cell for cell in cells if cell["setting"] == setting}
        shown = (
            f"{1e3 * of_setting[number]['median_seconds'][cache]:.1f} ({of_setting[number]['times_quiet'][cache]:.1f}x)"
            for cache, number in columns
        )
        lines.append(f"{setting:<25}" + "".join(f"{text:>{width}}" for text in shown))
    lines.append("In brackets: times as long as with the same setting when nothing else runs.")
    for cell in cells:
        shown = (f"{cache} {ratio:.2f}x" for cache, ratio in cell["times_stock"].items() if cache != STOCK)
        lines.append(f"against stock, {cell['setting']}, {cell['busy_processes']} busy: {', '.join(shown)}")
    return "\n".join(lines)


def answers(model_name: str, layers: int, context: int) -> Iterator[Any]:
    """Yield the numbers of threads, and, told a number of steps, seconds of so many of each of `DECODERS`."""
    warnings.filterwarnings("ignore", "Decode steps take")  # slow steps are what is measured
    if model_name == LLAMA_LAYERS:
        config = llama_1b_config(layers)
        config.vocab_size = VOCABULARY
        model: Any = random_llama(config, DTYPE)
    else:
        model, _ = load(model_name, DTYPE, torch.device("cpu"))
    quantized = copy.deepcopy(model)
    quantize_weights(quantized, 4)
    in_one_call = copy.deepcopy(quantized)
    fused = fuse_decode(in_one_call)
    pairs: dict[str, Any] = {name: (model, make) for name, make in CACHES.items()}
    for name, each in ((IN_4_BITS, quantized), (IN_ONE_CALL, in_one_call)):
        pairs[name] = each, lambda config: QuantizedHybridCache(config, bits=4)
    decoders = {}
    for name, (each, make) in pairs.items():
        decoders[name] = GreedyDecoder(each, filled_cache(make, model, context))
        decoders[name].step()  # compiles
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
    parser.add_argument("--model", default=LLAMA_LAYERS, help="a model by name (default: layers of Llama's shape)")
    parser.add_argument("--layers", type=int, default=4, help="of Llama's shape (default: %(default)s)")
    parser.add_argument("--context", type=int, default=8192, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed in each turn with each cache")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        tell(answers(arguments.model, arguments.layers, arguments.context))
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
    print(table(cells, busy))
    record = {
        "model": arguments.model,
        **({"layers": arguments.layers, "vocabulary": VOCABULARY} if arguments.model == LLAMA_LAYERS else {}),
        "dtype": str(DTYPE),
        "context_tokens": arguments.context,
        "prefill": "synthetic",
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "settings": {name: {"environment": SETTINGS[name], "threads": threads[name]} for name in chosen},
        "cells": cells,
    }

    def times(decoder: str, setting: str) -> list[float]:
        quiet = cells[0]["median_seconds"][decoder]
        return [round(cell["median_seconds"][decoder] / quiet, 2) for cell in cells if cell["setting"] == setting]

    found = {decoder: {setting: times(decoder, setting) for setting in chosen} for decoder in DECODERS}
    finish("busy_machine", record, found, arguments.out)


if __name__ == "__main__":
    main()
