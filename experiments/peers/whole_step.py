"""
A whole decode step on the CPU, weights and keys and values in as many bits: ours, with the model's own forward and in
one call (fused), transformers' and llama.cpp's.

All take turns; a timed step follows an untimed one of the same engine, as in decoding. Keys and values are synthetic:
random ones in our caches and `DynamicCache`; llama.cpp reads 256 tokens, and their keys and values are repeated. Its
weights are those of the same model, with all matrices in Q8_0 or Q4_0, written once into the user's cache folder. Its
best options are found first: weights repacked or not, and for keys and values of 16 bits flash attention or not, at
each context. ik_llama.cpp, a fork with kernels of its own, is measured where it is installed; either library may be
installed for another Python.

What does not fit into memory at once is measured in groups that share one row, and ratios are over that row in the same
group. The ceiling of a row is the time to read its weights, keys and values once, at the read bandwidth of the run.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch
from rich.progress import track
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.options import experiment_parser
from experiments.common.synthetic import kv_bytes
from experiments.common.timing import medians, samples_in_turns
from experiments.experts.random_experts import cut_config, random_model
from experiments.peers.gguf_files import gguf_file
from experiments.peers.library_pythons import add_python_options, pythons_of, reasons_to_leave_out
from experiments.peers.llama_options import BestOptions
from experiments.peers.llama_process import LlamaProcess, LlamaProcessError, Settings
from experiments.peers.step_engines import DTYPE, OurEngine, OurModels, filled_cache
from experiments.peers.step_rows import LIBRARIES, ROWS, Row, fitting, groups, over_reference, ratios, reference_of
from hf_hybrid_cache import get_num_threads, set_num_threads
from hf_hybrid_cache.models import load

# A shape that is cut to so many layers, with random weights.
EXPERTS = {"qwen3-30b-a3b-4-layers-random": ("Qwen/Qwen3-30B-A3B", 4)}
CONTEXTS = {
    "llama-3.2-1b-random": [1024, 8192, 32_768, 131_072],
    "smollm2-135m": [1024, 8000],
    **{name: [1024, 32_768] for name in EXPERTS},
}
# Memory besides weights, keys and values: of our processes and a step, and of each process of llama.cpp.
SPARE_BYTES, LIBRARY_BYTES = 2**31, 2**29


def step_model(name: str) -> PreTrainedModel:
    """Load or make the model of a key of `CONTEXTS`."""
    if name in EXPERTS:
        return random_model(cut_config(*EXPERTS[name]), DTYPE)
    model, _ = load(name, DTYPE, "cpu")
    return model


@dataclass(frozen=True)
class Bench:
    """The data that all contexts share."""

    config: PreTrainedConfig
    ours: OurModels
    files: Mapping[int, Path]
    pythons: Mapping[str, str]
    options: BestOptions
    memory: MemoryReader
    rounds: int

    def measure(self, rows: list[Row], context: int) -> dict[str, Any]:
        """A cell, with raw samples in seconds."""
        steps = 2 * (self.rounds + 1)
        sharing = max(Counter(row.holder for row in rows).values())  # rows that add their tokens to one cache
        tokens = max(1, context - sharing * steps)
        settings, left_out = self._settings(rows, tokens, steps)
        room = psutil.virtual_memory().available - SPARE_BYTES
        sizes = self._sizes(rows, context)
        able = [row for row in rows if row.name not in left_out]
        kept = fitting(able, sizes, room)
        left_out |= {row.name: f"no room for {sizes[row.holder] / 2**30:.1f} GiB" for row in able if row not in kept}
        self.memory.forget()
        parts = [self._measure_group(group, tokens, settings) for group in groups(kept, sizes, room)]
        bandwidth = self.memory.report()
        samples = [part["samples_seconds"] for part in parts]
        relative = over_reference([medians(each) for each in samples], reference_of(kept).name)
        holds = {name: held for part in parts for name, held in part["holds"].items()}
        seconds = {name: value for each in reversed(samples) for name, value in medians(each).items()}
        return {
            "context_tokens": context,
            "median_seconds": {row.name: seconds[row.name] for row in kept},
            "over_reference": relative,
            "ratios": ratios(relative),
            "share_of_ceiling": {
                name: (held["weight_bytes"] + held["kv_bytes"]) / bandwidth["bytes_per_second"] / seconds[name]
                for name, held in holds.items()
            },
            "holds": holds,
            "libraries": {library: report for part in parts for library, report in part["libraries"].items()},
            "settings": {name: used.told() for name, used in settings.items()},
            "left_out": left_out,
            "read_bandwidth": bandwidth,
            "samples_seconds": samples,
        }

    def _settings(self, rows: list[Row], tokens: int, steps: int) -> tuple[dict[str, Settings], dict[str, str]]:
        """Return the settings of the libraries' rows, and the reasons why some do not run."""
        settings, failures = {}, {}
        for row in track([row for row in rows if row.engine in LIBRARIES], "best options"):
            try:
                settings[row.name] = self.options.settings(row, tokens, steps)
            except LlamaProcessError as error:
                failures[row.name] = str(error)
        return settings, failures

    def _sizes(self, rows: list[Row], context: int) -> dict[str, float]:
        """Estimate the bytes of each holder, without our models."""
        full = kv_bytes(self.config, context, DTYPE)
        sizes = {}
        for row in rows:
            sizes[row.holder] = full if row.kv_bits == 16 else full * (row.kv_bits + 0.6) / 16
            if row.engine in LIBRARIES:
                sizes[row.holder] += self.files[row.weight_bits].stat().st_size + LIBRARY_BYTES
        return sizes

    def _read(self, engine: OurEngine | LlamaProcess) -> dict[str, Any]:
        """Return the bytes of weights, keys and values that a token reads."""
        share = 1.0 if isinstance(engine, OurEngine) else self.ours.read_share
        return engine.holds | {"weight_bytes": int(share * engine.holds["weight_bytes"])}

    def _measure_group(self, rows: list[Row], tokens: int, settings: Mapping[str, Settings]) -> dict[str, Any]:
        """Measure the rows of a group in turns."""
        caches: dict[str, Cache] = {}
        engines: dict[str, OurEngine | LlamaProcess] = {}
        random = Random(0)

        def step(name: str) -> float:
            return engines[name].step(random.randrange(self.config.vocab_size))

        def prepare(name: str) -> None:
            if name == rows[0].name:
                self.memory.read()
            step(name)

        try:
            for row in track(rows, f"{tokens:,} tokens"):
                if row.engine in LIBRARIES:
                    engines[row.name] = LlamaProcess(self.pythons[row.engine], settings[row.name])
                    continue
                if row.holder not in caches:
                    caches[row.holder] = filled_cache(row, self.config, tokens)
                engines[row.name] = OurEngine(self.ours, row, caches[row.holder])
            samples = samples_in_turns({name: partial(step, name) for name in engines}, self.rounds, prepare)
            return {
                "samples_seconds": samples,
                "holds": {name: self._read(engine) for name, engine in engines.items()},
                "libraries": {row.engine: engines[row.name].library for row in rows if row.engine in LIBRARIES},
            }
        finally:
            for engine in engines.values():
                engine.close()


def print_cell(cell: dict[str, Any]) -> None:
    print(f"{cell['context_tokens']:>7,} tokens{'a step':>19}{'weights':>13}{'KV':>13}{'of ceiling':>12}  options")
    for name, seconds in cell["median_seconds"].items():
        weights, kv = (cell["holds"][name][kind] / 2**20 for kind in ("weight_bytes", "kv_bytes"))
        used = ", ".join(option for option, on in cell["settings"].get(name, {}).items() if on is True)
        share = cell["share_of_ceiling"][name]
        print(f"{name:<22}{seconds * 1e3:>8.2f} ms{weights:>9,.0f} MiB{kv:>9,.0f} MiB{share:>12.0%}  {used}")
    for name, reason in cell["left_out"].items():
        print(f"{name:<22}    {reason}")
    for name, ratio in cell["ratios"].items():
        print(f"    {name}: {ratio:.2f}")


def main() -> None:
    parser = experiment_parser("whole_step", __doc__)
    parser.add_argument("--model", choices=CONTEXTS, default=next(iter(CONTEXTS)))
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens (default: by --model)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=get_num_threads())
    add_python_options(parser)
    arguments = parser.parse_args()
    contexts = arguments.contexts or CONTEXTS[arguments.model]
    pythons = pythons_of(arguments)
    set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    memory = MemoryReader(arguments.buffer_mib)
    read_bandwidth(memory)
    model = step_model(arguments.model)
    if max(contexts) > model.config.max_position_embeddings:
        parser.error(f"{arguments.model} has {model.config.max_position_embeddings:,} positions.")
    left_out = reasons_to_leave_out(pythons)
    if arguments.model in EXPERTS:
        left_out["fused"] = "layers with experts are not fused"
    rows = [row for row in ROWS.values() if row.name in arguments.rows and row.engine not in left_out]
    files = {
        bits: gguf_file(arguments.model, bits, model)
        for bits in sorted({row.weight_bits for row in rows if row.engine in LIBRARIES})
    }
    if not rows:
        sys.exit("Nothing is left to measure. " + " ".join(f"{name}: {why}." for name, why in left_out.items()))
    ours = OurModels(model, rows)
    options = BestOptions(pythons, files, arguments.threads)
    bench = Bench(model.config, ours, files, pythons, options, memory, arguments.rounds)
    cells = []
    for context in contexts:
        cells.append(bench.measure(rows, context))
        print_cell(cells[-1])
    for library, reason in left_out.items():
        print(f"{library} is left out: {reason}")
    record = {
        "model": arguments.model,
        "prefill": "synthetic",
        "dtype": str(DTYPE),
        "threads": arguments.threads,
        "cells": cells,
        "options_tried_seconds": options.tried,
        "left_out": left_out,
    }
    folder = arguments.out or records.RESULTS / "whole_step" / arguments.model
    print(f"record: {records.save('whole_step', record, folder)}")
    print(
        json.dumps(
            {
                str(cell["context_tokens"]): {name: round(ratio, 2) for name, ratio in cell["ratios"].items()}
                for cell in cells
            }
        )
    )


if __name__ == "__main__":
    main()
