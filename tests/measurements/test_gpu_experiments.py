"""Experiments for a GPU can be rehearsed, continue where they were stopped, and write their results into pages."""

import contextlib
import importlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.common import records
from experiments.gpu.answers import NOT_MEASURED, answers, table
from experiments.gpu.found import committed_records, decode_steps, found_in
from experiments.gpu.page import END, README, RESULTS_PAGE, START, decode_table, figure, pages, written
from experiments.gpu.running import Ended, Journal, run_all
from experiments.gpu.steps import Step, all_steps

REPOSITORY = Path(__file__).parents[2]


def program(name: str, code: str, limit_minutes: float = 1) -> Step:
    return Step(name, ("-c", code), limit_minutes)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 600, "check": False}
    return subprocess.run([sys.executable, "-m", "experiments.gpu", *arguments], **options)


def test_steps_when_run_again_then_only_failed_ones_run(tmp_path: Path):
    done, failing = program("done", "pass"), program("failing", "raise SystemExit(3)")
    journal = Journal(tmp_path)
    assert run_all([done, failing], journal, 1, again=False) == {"done": Ended.DONE, "failing": Ended.FAILED}
    journal = Journal(tmp_path)  # another command reads it from the file
    assert journal.is_done(done)
    assert not journal.is_done(failing)
    assert not journal.is_done(program("done", "print()"))  # another program by the same name
    noisy = program("done", "raise SystemExit(3)")
    assert run_all([noisy], journal, 1, again=True) == {"done": Ended.FAILED}


@pytest.mark.parametrize("stubborn", ["program", "child"])
def test_a_step_is_stopped_with_all_that_it_started(stubborn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("experiments.gpu.running._SECONDS_TO_STOP", 1)
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    child = ignore + child if stubborn == "child" else child
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    slow = program("slow", ignore + code if stubborn == "program" else code, limit_minutes=0.02)
    journal = Journal(tmp_path)
    assert run_all([slow], journal, 1, again=False) == {"slow": Ended.OVER_LIMIT}
    assert not journal.is_done(slow)
    # Nobody waits for the child, so what is left of it may be a zombie.
    process = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    deadline = time.monotonic() + 30
    while process.exists() and process.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.05)


def test_steps_when_time_is_short_then_are_not_begun(tmp_path: Path):
    step = program("step", "raise AssertionError")
    journal = Journal(tmp_path)
    assert run_all([step], journal, 0.1, again=False) == {"step": None}
    assert not journal.is_done(step)


def test_every_step_is_a_program_that_knows_its_options(tmp_path: Path):
    for step in all_steps(tmp_path, is_rehearsal=False, other_transformers=[tmp_path]):
        module, options = step.command[1], step.command[2:]
        source = (REPOSITORY / f"{module.replace('.', '/')}.py").read_text()
        shared = (REPOSITORY / "experiments" / "gpu" / "machine.py").read_text()
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in source + shared, (module, option)


def error_of(module: str, *arguments: str) -> str:
    """Return the error message of a program that refuses its arguments."""
    experiment, errors = importlib.import_module(f"experiments.{module}"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as ended:
            experiment.main()
    assert ended.value.code
    return f"{errors.getvalue()}{ended.value.code}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("module", ["gpu.__main__", "gpu.decode"])
def test_without_a_gpu_only_a_rehearsal_is_run(module: str):
    error = error_of(module)
    assert "no CUDA device is available" in error
    assert "--rehearse" in error


def test_step_when_unknown_then_error_lists_the_known_ones():
    error = error_of("gpu.__main__", "--rehearse", "--only", "streaming-300", "nothing")
    assert "there is no step nothing; there are suites, streaming-300," in error


@pytest.mark.slow
def test_a_rehearsal_runs_to_the_end_and_is_not_run_twice(tmp_path: Path):
    names = ["streaming-300", "attention", "peaks", "host", "experts"]
    arguments = ["--rehearse", "--minutes", "9", "--out", str(tmp_path), "--only", *names]
    result = command(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == dict.fromkeys(names, "done")
    found = found_in(tmp_path / "gpu", records.machine_name())
    assert set(found) == set(names)
    assert all(record["rehearsal"] for record in found.values())
    assert set(found["host"]["median_seconds"]) >= {"host, threads 1", "cpu-attention-4, threads 1"}
    again = command(*arguments)
    assert again.stdout.count("done before") == len(names)


def decode_record(context: int, seconds: dict[str, float]) -> dict[str, Any]:
    """Make a record of `experiments.gpu.decode`, of a machine that moves 10 GB/s."""
    memory = {name: {"device_bytes": 280 if name == "codes-4" else 1000, "host_bytes": 0} for name in seconds}
    half = "half-cpu-attention"
    pairs = (
        *(("offloaded", "stock-offloaded"), ("streamed-4", "offloaded"), ("codes-4", "dynamic")),
        *((half, "offloaded"), (half, "cpu-attention")),
    )
    return {
        "context_tokens": context,
        "median_seconds": seconds,
        "tokens_per_second": {name: 1 / value for name, value in seconds.items()},
        "share_of_bus": {name: 0.9 for name in seconds if name == "offloaded"},
        "bfloat16_kv_bytes": 1000,
        "memory": memory,
        "ratios": {
            f"{ours} / {theirs}": seconds[theirs] / seconds[ours]
            for ours, theirs in pairs
            if ours in seconds and theirs in seconds
        },
        "environment": {
            "gpu": "NVIDIA Test", "gpu_driver": "1.2", "gpu_bus": "5, 16", "cpu": "A CPU", "cores": 16,
            "versions": {"torch": "2.11"},
        },
    }  # fmt: skip


def found_of_a_good_machine() -> dict[str, dict[str, Any]]:
    streaming = {"stock-offloaded": 0.9, "offloaded": 0.25, "streamed-4": 0.08}
    quantized = {"dynamic": 0.02, "codes-4": 0.015, "cpu-attention-4, threads 16": 0.04}
    environment = decode_record(1, {})["environment"]
    suites = [
        {"transformers": version, "passed": 9, "failed": [], "exit_status": 0} for version in ("5.17.0", "5.23.0")
    ]
    peaks = {
        "prefill": {"context_tokens": 131_072, "above_expected": 0.03},
        "decode_on_cpu": {"allocated_bytes": 8 * 2**20},
    }
    return {
        "suites": {"runs": suites, "environment": environment},
        "peaks": peaks | {"environment": environment},
        "streaming-65536": decode_record(65_536, streaming),
        "quantized-131072": decode_record(131_072, quantized),
        "both-places-131072": decode_record(
            131_072, {"offloaded": 0.1, "cpu-attention": 0.1, "half-cpu-attention": 0.06}
        ),
    }


def test_without_records_nothing_is_said_to_be_measured():
    found = answers({})
    assert all(answer.measured is None and not answer.is_met for answer in found)
    assert table(found).count(NOT_MEASURED) == len(found)


def test_aims_when_records_fall_short_then_are_missed():
    good = found_of_a_good_machine()
    assert all(answer.is_met and answer.measured for answer in answers(good))
    assert "(missed)" not in table(answers(good))
    crashed = found_of_a_good_machine()
    crashed["suites"]["runs"][0] |= {"passed": 0, "exit_status": -11}
    assert not answers(crashed)[0].is_met
    stopped = found_of_a_good_machine()
    stopped["suites"]["runs"] += stopped["suites"]["runs"][:1]
    assert not answers(stopped)[0].is_met
    skipped = found_of_a_good_machine()
    skipped["suites"]["runs"] = [run | {"passed": 0} for run in skipped["suites"]["runs"]]
    assert answers(skipped)[0].measured is None
    bad = found_of_a_good_machine()
    bad["suites"]["runs"][0]["failed"] = ["a test"]
    bad["peaks"]["prefill"]["above_expected"] = 0.2
    bad["peaks"]["decode_on_cpu"]["allocated_bytes"] = 2**30
    slow = {"stock-offloaded": 0.3, "offloaded": 0.25, "streamed-4": 0.2}
    bad["streaming-65536"] = decode_record(65_536, slow) | {"share_of_bus": {"offloaded": 0.5}}
    bad["quantized-131072"] = decode_record(131_072, {"dynamic": 0.01, "codes-4": 0.015, "cpu-attention-4": 0.1})
    bad["quantized-131072"]["memory"]["codes-4"]["device_bytes"] = 500
    no_gain = {"offloaded": 0.1, "cpu-attention": 0.1, "half-cpu-attention": 0.11}
    bad["both-places-131072"] = decode_record(131_072, no_gain)
    assert not any(answer.is_met for answer in answers(bad))
    assert table(answers(bad)).count("(missed)") == len(answers(bad))


def test_pages_say_what_the_committed_records_say():
    for path, said in pages(committed_records()):
        text = path.read_text()
        assert written(text, said) == text, f"python -m experiments.report writes {path.name}"


def test_pages_take_up_a_machine_with_its_card_bus_and_driver():
    found = found_of_a_good_machine()
    said = dict(pages({"a-machine": found}))
    assert "NVIDIA Test" in said[README]
    assert table(answers(found)) in said[RESULTS_PAGE]
    assert decode_table(found) in said[RESULTS_PAGE]
    assert "driver 1.2, bus (generation of PCIe, lanes) 5, 16" in said[RESULTS_PAGE]
    page = f"before\n{START}\nold\n{END}\nafter\n"
    assert written(page, "new\n") == f"before\n{START}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="there must be"):
        written("a page without a place", "new\n")
    lines = figure(found).axes[0].get_lines()
    assert {line.get_label() for line in lines} == {"dynamic", "codes-4", "stock-offloaded", "offloaded", "streamed-4"}
    assert [record["context_tokens"] for record in decode_steps(found)] == [65_536, 131_072, 131_072]
