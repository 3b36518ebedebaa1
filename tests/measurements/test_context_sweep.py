"""The sweep measures each cell apart, keeps records whole, believes no damaged one, and compares what is comparable."""

import contextlib
import csv
import json
import mmap
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import context_sweep
from experiments.context_sweep import run_limited
from experiments.sweep import store
from experiments.sweep.caches import CACHES
from experiments.sweep.measure import PeakMemory
from experiments.sweep.page import page
from experiments.sweep.store import Cell

from common.programs import wait_for_compilation
from models.byte_tokenizer import model_in

CELL = Cell("a-model", "dynamic", "cpu", 1024, 3, "real")
ENVIRONMENT = {
    "date": "2026-01-01T00:00:00+00:00", "git_revision": None, "git_clean": None, "cpu": "a processor", "cores": 2,
    "threads": 2, "memory_bytes": 2**34, "gpu": None, "python": "3.11",
    "versions": {"torch": "2", "transformers": "5"}, "read_bytes_per_second": 2e10,
}  # fmt: skip
SMALL = ["--caches", "stock", "dynamic", "--contexts", "70", "--new-tokens", "3"]
Sweep = Callable[..., str]


def record_of(cell: Cell, seconds: float = 0.1) -> dict[str, Any]:
    result = {
        "status": "measured",
        "ttft_seconds": 1.0,
        "step_seconds": [seconds] * (cell.new_tokens - 1),
        "tokens_per_second": 1 / seconds,
        "tpot_seconds": dict.fromkeys(("mean", "p50", "p95", "p99"), seconds),
        "peak_bytes": {"host_over_model": 2**20, "device_allocated": None, "device_reserved": None},
        "kv_bytes": 1024 * cell.context_tokens,
        "memory": None,
        "moved": None,
        "weight_bytes": 2**30,
    }
    return {"cell": asdict(cell), "limit_seconds": 60.0, "result": result, "environment": ENVIRONMENT}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"), 2**13)


@pytest.fixture
def sweep(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sweep:
    """The command in this process, with records in a folder: what it prints."""

    def run(*options: str) -> str:
        given = ["--model", str(model), *SMALL, "--out", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", ["experiments.context_sweep", *given])
        with contextlib.suppress(SystemExit):
            context_sweep.main()
        return "".join(capsys.readouterr())

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic", "dynamic-weights-8", "quantized-4-weights-4"])
def test_a_cell_is_measured_and_recorded(name: str, sweep: Sweep, tmp_path: Path):
    assert sweep("--caches", "dynamic", name).splitlines()[-1] == json.dumps({"measured": 1 + (name != "dynamic")})
    results = {cell.cache: record["result"] for cell, record in store.read(tmp_path).records.items()}
    for cache, result in results.items():
        numbers, bits = 2 * 2 * 2 * 16 * 69, CACHES[cache].weights  # the last token is only predicted
        whole = numbers * 4  # the model is saved in float32
        # Room for the tokens of a quantized layer that stay in full precision is made whole.
        least, most = (0.2, 3) if "quantized" in cache else (1, 2)
        assert least * whole <= result["kv_bytes"] <= most * whole
        assert len(result["step_seconds"]) == 2
        assert result["peak_bytes"]["host_over_model"] >= 0  # so little may fit into what was given back before
        if bits is not None:  # codes are read, with scales, and a head in 8 bits
            share = result["weight_bytes"] / results["dynamic"]["weight_bytes"]
            assert bits < share * 32 < bits + 3
    with (tmp_path / store.SUMMARY).open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["measured"] * len(results)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Cell | None]:
    """Cells that were measured, with made-up records; a `None` at the end is Ctrl-C in place of the next."""
    cells: list[Cell | None] = []

    def measured_apart(cell: Cell, *_: object) -> dict[str, Any]:
        if cells and cells[-1] is None:
            cells.pop()
            raise KeyboardInterrupt
        cells.append(cell)
        return record_of(cell)

    monkeypatch.setattr(context_sweep, "measured_apart", measured_apart)
    return cells


def test_a_sweep_that_was_stopped_goes_on_and_damaged_cells_are_measured(
    sweep: Sweep, tmp_path: Path, measured: list[Cell | None]
):
    measured.append(None)
    assert "0 records are kept" in sweep()
    sweep("--caches", "stock")
    assert "2 cells, 1 measured before" in sweep()
    (path,) = tmp_path.glob("*stock*.json")
    path.write_bytes(path.read_bytes()[:200])
    printed = sweep()
    assert f"damaged, not used: {path.name}" in printed
    assert "2 cells, 1 measured before" in printed
    assert not store.read(tmp_path).damaged
    sweep("--force")
    assert [cell and cell.cache for cell in measured] == ["stock", "dynamic", "stock", "stock", "dynamic"]


@pytest.mark.parametrize(
    ("whole", "changed"),
    [
        ("[0.1, 0.1]", "[0.1]"),
        ("[0.1, 0.1]", "[NaN, 1.0]"),
        ('"environment"', '"surroundings"'),
        ('"context_tokens": 1024', '"context_tokens": 2048'),
        ("}}", "}"),
    ],
)
def test_a_record_that_contradicts_itself_is_not_believed(whole: str, changed: str, tmp_path: Path):
    path = store.write(tmp_path, record_of(CELL))
    assert store.read(tmp_path).records.keys() == {CELL}
    path.write_text(json.dumps(json.loads(path.read_text())).replace(whole, changed))
    stored = store.read(tmp_path)
    assert (list(stored.records), list(stored.damaged)) == ([], [path])


def test_the_committed_records_of_the_sweep_are_whole():
    assert not any(store.read(folder).damaged for folder in store.FOLDER.glob("*"))


@pytest.mark.parametrize(
    ("program", "status", "message"),
    [
        ("import time; time.sleep(600)", "time limit", "not done in"),
        ("raise ValueError('no such thing')", "failed", "ValueError: no such thing"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "exit status -9"),  # while memory is left
    ],
)
def test_a_program_that_does_not_succeed_has_a_result(program: str, status: str, message: str):
    result = run_limited([sys.executable, "-c", program], limit_seconds=0.5 if status == "time limit" else 60)
    assert result is not None
    assert result["status"] == status
    assert message in result["message"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the highest RSS")
def test_a_peak_of_memory_is_kept_when_the_memory_is_freed():
    def hold(num_bytes: int) -> None:
        with mmap.mmap(-1, num_bytes) as pages:  # not freed ones that an allocator has at hand
            np.frombuffer(pages, np.uint8).fill(1)

    hold(2**27)
    wait_for_compilation()
    peaks = PeakMemory()
    hold(2**25)
    peak = peaks.report()["host_over_model"]
    assert peak is not None
    assert 2**25 * 0.9 < peak < 2**26


def test_the_page_compares_with_transformers_and_says_what_did_not_fit():
    found = [
        record_of(replace(CELL, cache=cache, context_tokens=context), seconds)
        for context in (1024, 2048)
        for cache, seconds in (("stock", 0.02), ("dynamic", 0.01))
    ]
    found[2]["result"] = {"status": "out of memory", "message": "no more"}
    text = page({"a-machine": found})
    assert "- transformers DynamicCache, decode on the CPU: from 2,048 tokens on" in text
    assert "at 1,024 tokens: 100.00 tokens/s" in text
    assert "with 100% of the keys and values of transformers' DynamicCache, which makes 50.00." in text
