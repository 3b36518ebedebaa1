"""
Whole prompts beside llama.cpp and ik_llama.cpp: the same model, weights and keys and values in as many bits, in turns.

llama.cpp reads in batches of 512 tokens, as it does by default, with flash attention; weights repacked or not,
whichever reads 512 tokens faster. A library starts anew for each prompt, and reads 256 tokens before the timed ones;
ours and `stock` read 512 once. A row that would take longer than a limit, if a prompt costs its square, is left out.
`stock` is transformers' `DynamicCache`, in one piece; ours read in chunks of 2,048. Token ids are random. Either
library may be installed for another Python.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.common import records
from experiments.common.decoding import prefill
from experiments.common.options import experiment_parser
from experiments.common.timing import medians, samples_in_turns
from experiments.peers.gguf_files import gguf_file
from experiments.peers.library_pythons import add_python_options, pythons_of, reasons_to_leave_out
from experiments.peers.llama_options import KV_FORMS, WEIGHT_ORDERS
from experiments.peers.llama_process import LlamaProcess, LlamaProcessError, Settings
from experiments.peers.step_engines import DTYPE, OurModels, empty_cache
from experiments.peers.step_rows import LIBRARIES, Row
from hf_hybrid_cache import get_num_threads, set_num_threads
from hf_hybrid_cache.models import load
from hf_hybrid_cache.planning import default_chunk

CONTEXTS = {"smollm2-135m": [512, 2048, 8000], "llama-3.2-1b-random": [512, 2048, 8192, 32768]}
_BITS = ((16, 16), (8, 8), (4, 4))
ROWS = {
    row.name: row
    for row in [
        Row("stock", 16, 16),
        Row("ours", 16, 8),
        *(Row(engine, *bits) for engine in ("ours", *LIBRARIES) for bits in _BITS),
        *(Row(engine, 8, 16) for engine in LIBRARIES),
    ]
}
CHUNK = default_chunk(on_gpu=False)
TRIED_TOKENS = 512


@dataclass(frozen=True)
class Bench:
    """The data that all prompts share; `orders` has the order of each library row's weights."""

    ours: OurModels
    files: dict[int, Path]
    pythons: dict[str, str]
    threads: int
    orders: dict[str, str]

    def seconds(self, row: Row, tokens: int) -> float:
        """
        Return the seconds of a prompt.

        Raises:
            LlamaProcessError: the library ended.
        """
        if row.engine in LIBRARIES:
            return self.library_seconds(row, tokens, self.orders[row.name])
        model = self.ours.of(row)
        ids = torch.randint(5, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        cache = empty_cache(row, model.config)
        start = time.perf_counter()
        prefill(model, cache, ids, tokens if row.engine == "stock" else CHUNK)
        return time.perf_counter() - start

    def library_seconds(self, row: Row, tokens: int, order: str) -> float:
        settings = Settings(
            row.engine,
            str(self.files[row.weight_bits]),
            WEIGHT_ORDERS[order],
            KV_FORMS[row.kv_bits]["flash"],
            tokens,
            1,
            self.threads,
            prompt=tokens,
        )
        process = LlamaProcess(self.pythons[row.engine], settings)
        process.close()
        return process.prompt_seconds

    def choose_order(self, row: Row) -> dict[str, float | str]:
        """Use the order of weights that reads fastest; return the seconds of each, or its error."""
        tried: dict[str, float | str] = {}
        for order in WEIGHT_ORDERS:
            try:
                tried[order] = min(self.library_seconds(row, TRIED_TOKENS, order) for _ in range(2))
            except LlamaProcessError as error:
                tried[order] = str(error)
        seconds = {order: value for order, value in tried.items() if isinstance(value, float)}
        if seconds:
            self.orders[row.name] = min(seconds, key=seconds.__getitem__)
        return tried

    def measure(self, rows: list[Row], tokens: int, rounds: int) -> dict[str, Any]:
        """A cell, with raw samples in seconds."""
        measures = {row.name: partial(self.seconds, row, tokens) for row in rows}
        samples = samples_in_turns(measures, rounds, lambda name: None, warm_up=False)
        return {"tokens": tokens, "median_seconds": medians(samples), "samples_seconds": samples}


def within(limit: float, rows: list[Row], tokens: int, cells: list[dict[str, Any]]) -> list[Row]:
    """The rows that the last cell lets expect to read `tokens` in `limit` seconds, if a prompt costs its square."""
    if not cells:
        return rows
    last = cells[-1]
    expected = {name: seconds * (tokens / last["tokens"]) ** 2 for name, seconds in last["median_seconds"].items()}
    return [row for row in rows if expected.get(row.name, limit + 1) <= limit]


def print_cell(cell: dict[str, Any]) -> None:
    fastest = min(cell["median_seconds"].values())
    print(f"{cell['tokens']:>7,} tokens{'prefill':>18}")
    for name, seconds in cell["median_seconds"].items():
        print(f"{name:<22}{seconds:>8.2f} s{fastest / seconds:>9.0%} of the fastest", flush=True)


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--model", choices=CONTEXTS, default=next(iter(CONTEXTS)))
    parser.add_argument("--tokens", type=int, nargs="+", help="(default: by --model)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1000.0, help="seconds of a prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=get_num_threads())
    add_python_options(parser)
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of(experiment_parser("prompt_peers", __doc__))
    pythons = pythons_of(arguments)
    left_out = reasons_to_leave_out(pythons)
    rows = [row for row in ROWS.values() if row.name in arguments.rows and row.engine not in left_out]
    if not rows:
        sys.exit("Nothing is left to measure. " + " ".join(f"{name}: {why}." for name, why in left_out.items()))
    set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    model, _ = load(arguments.model, DTYPE, "cpu")
    theirs = [row for row in rows if row.engine in LIBRARIES]
    files = {bits: gguf_file(arguments.model, bits, model) for bits in sorted({row.weight_bits for row in theirs})}
    ours = OurModels(model, rows)
    bench = Bench(ours, files, pythons, arguments.threads, {})
    tried = {row.name: bench.choose_order(row) for row in theirs}
    rows = [row for row in rows if row not in theirs or row.name in bench.orders]
    for row in rows:
        if row not in theirs:
            bench.seconds(row, TRIED_TOKENS)
    cells: list[dict[str, Any]] = []
    for tokens in sorted(arguments.tokens or CONTEXTS[arguments.model]):
        if measured := within(arguments.limit, rows, tokens, cells):
            cells.append(bench.measure(measured, tokens, arguments.rounds))
            print_cell(cells[-1])
    record = {
        "model": arguments.model,
        "dtype": str(DTYPE),
        "chunk": CHUNK,
        "limit_seconds": arguments.limit,
        "threads": arguments.threads,
        "cells": cells,
        "orders": bench.orders,
        "tried_seconds": tried,
        "left_out": left_out,
    }
    folder = arguments.out or records.RESULTS / "prompt_peers" / arguments.model
    print(f"record: {records.save('prompt_peers', record, folder)}")
    print(json.dumps({str(cell["tokens"]): cell["median_seconds"] for cell in cells}))


if __name__ == "__main__":
    main()
