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

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import psutil
from transformers.cache_utils import Cache

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.harness import Cell, publish
from experiments.common.options import experiment_parser
from experiments.common.synthetic import kv_bytes
from experiments.common.timing import medians, samples_in_turns
from experiments.common.told_process import EndedError
from experiments.peers.llama_process import BestOptions, LlamaProcess, Settings
from experiments.peers.step_engines import DTYPE, EXPERTS, OurEngine, Setup, add_row_options, row_cache, set_up
from experiments.peers.step_rows import LIBRARIES, ROWS, Row, fitting, groups, over_reference, ratios, reference_of

CONTEXTS = {
    "llama-3.2-1b-random": [1024, 8192, 32_768, 131_072],
    "smollm2-135m": [1024, 8000],
    **{name: [1024, 32_768] for name in EXPERTS},
}
# Memory besides weights, keys and values: of our processes and a step, and of each process of llama.cpp.
SPARE_BYTES, LIBRARY_BYTES = 2**31, 2**29


@dataclass(frozen=True)
class Bench:
    """The data that all contexts share."""

    given: Setup
    options: BestOptions
    memory: MemoryReader
    rounds: int

    def measure(self, context: int) -> Cell:
        """A cell, with raw samples in seconds."""
        rows, steps = self.given.rows, 2 * (self.rounds + 1)
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
        for row in rows:
            if row.engine in LIBRARIES:
                try:
                    settings[row.name] = self.options.settings(row, tokens, steps)
                except EndedError as error:
                    failures[row.name] = str(error)
        return settings, failures

    def _sizes(self, rows: list[Row], context: int) -> dict[str, float]:
        """Estimate the bytes of each holder, without our models."""
        full = kv_bytes(self.given.model.config, context, DTYPE)
        sizes = {}
        for row in rows:
            sizes[row.holder] = full if row.kv_bits == 16 else full * (row.kv_bits + 0.6) / 16
            if row.engine in LIBRARIES:
                sizes[row.holder] += self.given.files[row.weight_bits].stat().st_size + LIBRARY_BYTES
        return sizes

    def _read(self, engine: OurEngine | LlamaProcess) -> dict[str, Any]:
        """Return the bytes of weights, keys and values that a token reads."""
        share = 1.0 if isinstance(engine, OurEngine) else self.given.ours.read_share
        return engine.holds | {"weight_bytes": int(share * engine.holds["weight_bytes"])}

    def _measure_group(self, rows: list[Row], tokens: int, settings: Mapping[str, Settings]) -> dict[str, Any]:
        """Measure the rows of a group in turns."""
        caches: dict[str, Cache] = {}
        engines: dict[str, OurEngine | LlamaProcess] = {}
        random = Random(0)

        def step(name: str) -> float:
            return engines[name].step(random.randrange(self.given.model.config.vocab_size))

        def prepare(name: str) -> None:
            if name == rows[0].name:
                self.memory.read()
            step(name)

        try:
            for row in rows:
                if row.engine in LIBRARIES:
                    engines[row.name] = LlamaProcess(self.given.pythons[row.engine], settings[row.name])
                    continue
                if row.holder not in caches:
                    caches[row.holder] = row_cache(row, self.given.model, tokens)
                engines[row.name] = OurEngine(self.given.ours, row, caches[row.holder])
            samples = samples_in_turns({name: partial(step, name) for name in engines}, self.rounds, prepare)
            return {
                "samples_seconds": samples,
                "holds": {name: self._read(engine) for name, engine in engines.items()},
                "libraries": {row.engine: engines[row.name].library for row in rows if row.engine in LIBRARIES},
            }
        finally:
            for engine in engines.values():
                engine.close()


def main() -> None:
    parser = experiment_parser("whole_step", __doc__)
    add_row_options(parser, CONTEXTS, ROWS, rounds=15)
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens (default: by --model)")
    arguments = parser.parse_args()
    contexts = arguments.contexts or CONTEXTS[arguments.model]
    given = set_up(arguments, ROWS)
    if max(contexts) > given.model.config.max_position_embeddings:
        parser.error(f"{arguments.model} has {given.model.config.max_position_embeddings:,} positions.")
    memory = MemoryReader(arguments.buffer_mib)
    read_bandwidth(memory)
    options = BestOptions(given.pythons, given.files, arguments.threads)
    bench = Bench(given, options, memory, arguments.rounds)
    publish(
        "whole_step",
        ((str(context), bench.measure(context)) for context in contexts),
        arguments.out or records.RESULTS / "whole_step" / arguments.model,
        lambda cell: cell["ratios"],
        model=arguments.model,
        prefill="synthetic",
        dtype=str(DTYPE),
        threads=arguments.threads,
        options_tried_seconds=options.tried,
        left_out=given.left_out,
    )


if __name__ == "__main__":
    main()
