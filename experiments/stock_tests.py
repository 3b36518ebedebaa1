"""
The tests of transformers, or of accelerate, with our caches in the place of `DynamicCache`.

PATH is a checkout (`git clone --depth 1 https://github.com/huggingface/transformers`), best of the version that is
installed: its tests run with the packages that are installed, not with its own. They need `parameterized`, `httpx` and
`timeout-decorator`. Nothing is downloaded, so tests that need the Hub fail with stock too.

Each test runs as it is at first. Those that pass, and made a `DynamicCache` of a config, run again with each of our
caches in its place (`experiments.stock_tests_plugin`). All run under `torch.no_grad()`, because ours keep no
gradients, and with the same random numbers.

    python -m experiments.stock_tests ~/transformers
    python -m experiments.stock_tests ~/transformers --caches DynamicHybridCache --files tests/models/opt
    python -m experiments.stock_tests ~/accelerate --files tests/test_hooks.py tests/test_big_modeling.py
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.common import records
from experiments.common.options import plain_parser
from experiments.stock_tests_plugin import CACHES

FAMILIES = (
    *("bamba", "bart", "gemma2", "gemma3", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen3", "qwen3_moe"),
    *("qwen3_next", "t5"),
)
FILES = (
    "tests/utils/test_cache_utils.py",
    "tests/generation/test_utils.py",
    *(f"tests/models/{family}/test_modeling_{family}.py" for family in FAMILIES),
)
# They take long, and use other caches, or no more than a prompt.
LEFT_OUT = ("compil", "export", "quant_cache", "training", "eager_matches", "bc_torch_dtype")
_MARKS_LEFT_OUT = "not (torch_compile_test or torch_export_test)"

Outcome = dict[str, Any]
Outcomes = dict[str, Outcome]


def run(checkout: Path, cache: str | None, tests: Iterable[str], limit: float, chosen: str | None = None) -> Outcomes:
    """
    Run tests in a process of their own.

    Args:
        checkout: where the tests are.
        cache: a key of `CACHES`, `None` for transformers' own.
        tests: files, or the names of tests.
        limit: seconds after which the process is ended.
        chosen: an expression of pytest's `-k`.

    Returns:
        What became of each test; the one that the process ended in has failed.
    """
    with TemporaryDirectory() as folder:
        outcomes, names = Path(folder) / "outcomes", Path(folder) / "tests"
        outcomes.touch()
        names.write_text("\n".join(tests))
        paths = [str(records.RESULTS.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "STOCK_TESTS_CACHE": cache or "",
            "STOCK_TESTS_OUTCOMES": str(outcomes),
        }
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--continue-on-collection-errors"]
        command += ["-p", "experiments.stock_tests_plugin", "-p", "no:cacheprovider", "-m", _MARKS_LEFT_OUT]
        command += [*(["-k", chosen] if chosen else []), f"@{names}"]
        try:
            subprocess.run(command, cwd=checkout, env=environment, timeout=limit, stdout=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            print(f"{cache or 'stock'}: ended after {limit:,.0f} s", file=sys.stderr)
        return outcomes_of(map(json.loads, outcomes.read_text().splitlines()))


def outcomes_of(lines: Iterable[dict[str, Any]]) -> Outcomes:
    """Return the outcome of each test, from the lines that the plugin has written."""
    outcomes: Outcomes = {}
    for line in lines:
        if "begun" in line:
            outcomes[line["begun"]] = {"outcome": "failed", "caches": 0, "error": "The process ended."}
        else:
            outcomes[line.pop("test")] = line
    return outcomes


def cells_of(stock: Outcomes, ours: Mapping[str, Outcomes]) -> list[dict[str, Any]]:
    """
    Count the tests of each kind for each file and cache, and list those that fail only with our cache.

    Attributes of a cell: `passed` and `failed_by_us` (a list of test and error) of the tests that pass with stock and
    make a cache, `not_reached` of them, `failed_by_stock` for any reason, and `without_a_cache`, which pass and make
    none.
    """
    cells = []
    for file in sorted({_file_of(test) for test in stock}):
        in_file = {test: outcome for test, outcome in stock.items() if _file_of(test) == file}
        comparable = [test for test, outcome in in_file.items() if is_comparable(outcome)]
        numbers = Counter(outcome["outcome"] for outcome in in_file.values())
        for cache, outcomes in ours.items():
            reached = {test: outcomes[test] for test in comparable if test in outcomes}
            failed = {test: each.get("error", "") for test, each in reached.items() if each["outcome"] != "passed"}
            cells.append(
                {
                    "file": file,
                    "cache": cache,
                    "passed": len(reached) - len(failed),
                    "failed_by_us": [{"test": test, "error": error} for test, error in failed.items()],
                    "not_reached": len(comparable) - len(reached),
                    "failed_by_stock": numbers["failed"],
                    "skipped_by_stock": numbers["skipped"],
                    "without_a_cache": numbers["passed"] - len(comparable),
                }
            )
    return cells


def is_comparable(outcome: Outcome) -> bool:
    """Whether a test tells something about our cache: it passes with stock, and makes a cache."""
    return outcome["outcome"] == "passed" and outcome["caches"] > 0


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def table(cells: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the number of tests of each kind, by cache."""
    lines = [
        "| cache in the place of `DynamicCache` | pass | fail by us | not reached | fail with stock too |",
        "|---|---:|---:|---:|---:|",
    ]
    cells = list(cells)
    for cache in dict.fromkeys(cell["cache"] for cell in cells):
        of_it = [cell for cell in cells if cell["cache"] == cache]
        passed, missed, stock = (
            sum(cell[key] for cell in of_it) for key in ("passed", "not_reached", "failed_by_stock")
        )
        failed = sum(len(cell["failed_by_us"]) for cell in of_it)
        lines.append(f"| `{cache}` | {passed:,} | {failed:,} | {missed:,} | {stock:,} |")
    return "\n".join(lines)


def main() -> None:
    parser = plain_parser("stock_tests", __doc__)
    parser.add_argument("path", type=Path, help="a checkout of transformers or accelerate")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES), help="which of ours")
    parser.add_argument("--files", nargs="+", default=FILES, help="in PATH (default: caches, generation, 13 families)")
    parser.add_argument(
        "-k",
        default=f"not ({' or '.join(LEFT_OUT)})",
        help='which tests, as pytest has it; "" for all, which takes hours (default: %(default)s)',
    )
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a cache (default: %(default)s)")
    options = parser.parse_args()
    stock = run(options.path, None, options.files, options.limit, options.k)
    if not stock:
        sys.exit(f"No test ran: see what `{sys.executable} -m pytest {options.files[0]}` says in {options.path}.")
    comparable = [test for test, outcome in stock.items() if is_comparable(outcome)]
    print(f"{len(stock):,} tests, of which {len(comparable):,} pass with stock and make a DynamicCache", flush=True)
    ours = {
        cache: run(options.path, cache, comparable, options.limit) if comparable else {} for cache in options.caches
    }
    cells = cells_of(stock, ours)
    for cell in cells:
        for failed in cell["failed_by_us"]:
            print(f"fails by us: {cell['cache']}: {failed['test']}\n    {failed['error']}")
    print(table(cells))
    by_stock = {test: each["error"] for test, each in stock.items() if each["outcome"] == "failed"}
    record = {"tests": options.k, "cells": cells, "failed_by_stock": by_stock}
    print(f"record: {records.save('stock_tests', record, options.out)}")
    print(json.dumps({cache: sum(len(c["failed_by_us"]) for c in cells if c["cache"] == cache) for cache in ours}))


if __name__ == "__main__":
    main()
