"""
Whole prompts beside llama.cpp and ik_llama.cpp: the same model, weights and keys and values in as many bits, in turns.

llama.cpp reads in batches of 512 tokens, as it does by default, with flash attention; weights repacked or not,
whichever reads 512 tokens faster. A library starts anew for each prompt, and reads 256 tokens before the timed ones;
ours and `stock` read 512 once. A row that would take longer than a limit, if a prompt costs its square, is left out.
`stock` is transformers' `DynamicCache`, in one piece; ours read in chunks. Token ids are random. Either library may be
installed for another Python.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from experiments.common import records
from experiments.common.decoding import prefill
from experiments.common.harness import Cell, publish, summed_up
from experiments.common.options import plain_parser
from experiments.common.timing import samples_in_turns
from experiments.common.told_process import EndedError
from experiments.peers.llama_process import KV_FORMS, WEIGHT_ORDERS, LlamaProcess, Settings
from experiments.peers.step_engines import DTYPE, Setup, add_row_options, empty_cache, set_up
from experiments.peers.step_rows import LIBRARIES, Row
from hf_hybrid_cache.planning import default_chunk

CONTEXTS = {"smollm2-135m": [512, 2048, 8000], "llama-3.2-1b-random": [512, 2048, 8192, 32768]}
_BITS = ((16, 16), (8, 8), (4, 4))
ROWS = {
    row.name: row
    for row in [
        Row("stock", 16, 16),
        *(Row("ours", weight_bits, bits) for weight_bits in (16, 8, 4) for bits in (16, 8, 4)),
        Row("ours", 16, 2),
        *(Row(engine, *bits) for engine in LIBRARIES for bits in _BITS),
        *(Row(engine, bits, 16) for engine in LIBRARIES for bits in (8, 4)),
    ]
}
TRIED_TOKENS = 512


@dataclass(frozen=True)
class Bench:
    """The data that all prompts share; `orders` has the order of each library row's weights."""

    given: Setup
    threads: int
    chunk: int
    orders: dict[str, str] = field(default_factory=dict)

    def seconds(self, row: Row, tokens: int) -> float:
        """
        Return the seconds of a prompt.

        Raises:
            EndedError: the library ended.
        """
        if row.engine in LIBRARIES:
            return self.library_seconds(row, tokens, self.orders[row.name])
        model = self.given.ours.of(row)
        ids = torch.randint(5, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        cache = empty_cache(row, model.config)
        start = time.perf_counter()
        prefill(model, cache, ids, tokens if row.engine == "stock" else self.chunk)
        return time.perf_counter() - start

    def library_seconds(self, row: Row, tokens: int, order: str) -> float:
        file, form = str(self.given.files[row.weight_bits]), KV_FORMS[row.kv_bits]["flash"]
        settings = Settings(row.engine, file, WEIGHT_ORDERS[order], form, tokens, 1, self.threads, prompt=tokens)
        process = LlamaProcess(self.given.pythons[row.engine], settings)
        process.close()
        return process.prompt_seconds

    def choose_order(self, row: Row) -> dict[str, float | str]:
        """Use the order of weights that reads fastest; return the seconds of each, or its error."""
        tried: dict[str, float | str] = {}
        for order in WEIGHT_ORDERS:
            try:
                tried[order] = min(self.library_seconds(row, TRIED_TOKENS, order) for _ in range(2))
            except EndedError as error:
                tried[order] = str(error)
        seconds = {order: value for order, value in tried.items() if isinstance(value, float)}
        if seconds:
            self.orders[row.name] = min(seconds, key=seconds.__getitem__)
        return tried

    def measure(self, rows: list[Row], tokens: int, rounds: int) -> Cell:
        """A cell, with raw samples in seconds."""
        measures = {row.name: partial(self.seconds, row, tokens) for row in rows}
        return {"tokens": tokens, **summed_up(samples_in_turns(measures, rounds, lambda name: None, warm_up=False))}


def within(limit: float, rows: list[Row], tokens: int, cells: list[Cell]) -> list[Row]:
    """The rows that the last cell lets expect to read `tokens` in `limit` seconds, if a prompt costs its square."""
    if not cells:
        return rows
    last = cells[-1]
    expected = {name: seconds * (tokens / last["tokens"]) ** 2 for name, seconds in last["median_seconds"].items()}
    return [row for row in rows if expected.get(row.name, limit + 1) <= limit]


def main() -> None:
    parser = plain_parser("prompt_peers/MODEL", __doc__)
    add_row_options(parser, CONTEXTS, ROWS, rounds=2)
    parser.add_argument("--tokens", type=int, nargs="+", help="(default: by --model)")
    parser.add_argument("--chunk", type=int, default=default_chunk(on_gpu=False), help="of ours (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=1000.0, help="seconds of a prompt (default: %(default)s)")
    arguments = parser.parse_args()
    given = set_up(arguments, ROWS)
    bench = Bench(given, arguments.threads, arguments.chunk)
    theirs = [row for row in given.rows if row.engine in LIBRARIES]
    tried = {row.name: bench.choose_order(row) for row in theirs}
    rows = [row for row in given.rows if row not in theirs or row.name in bench.orders]
    for row in rows:
        if row not in theirs:
            bench.seconds(row, TRIED_TOKENS)

    def cells() -> Iterator[tuple[str, Cell]]:
        found: list[Cell] = []
        for tokens in sorted(arguments.tokens or CONTEXTS[arguments.model]):
            if measured := within(arguments.limit, rows, tokens, found):
                found.append(bench.measure(measured, tokens, arguments.rounds))
                yield str(tokens), found[-1]

    publish(
        "prompt_peers",
        cells(),
        arguments.out or records.RESULTS / "prompt_peers" / arguments.model,
        lambda cell: cell["median_seconds"],
        model=arguments.model,
        dtype=str(DTYPE),
        chunk=arguments.chunk,
        limit_seconds=arguments.limit,
        threads=arguments.threads,
        orders=bench.orders,
        tried_seconds=tried,
        left_out=given.left_out,
    )


if __name__ == "__main__":
    main()
