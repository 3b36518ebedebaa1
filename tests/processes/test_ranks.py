"""The command in several processes, as `torchrun` starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from hf_hybrid_cache.cli.app import app

from documentation.test_documentation import REPORT, byte_tokenizer
from models.tiny_models import COMMON
from processes.groups import free_port

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo, which this torch was built without", allow_module_level=True)

pytestmark = pytest.mark.xdist_group("groups")

SECONDS_TO_END = 120
QUESTION = ["--question", "Who signed it?", "--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a document."""
    folder = tmp_path_factory.mktemp("ranks")
    tokenizer = byte_tokenizer()
    sizes = COMMON | {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_hidden_layers=2)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "report.txt").write_text(REPORT)
    return folder


def run_together(folder: Path, *options: str, processes: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Run `generate` with these options in each of the processes."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    common = {**os.environ, **meeting, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "hf_hybrid_cache.cli", "generate", "--model", str(folder / "model"), *options],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    ended = []
    for process in started:
        out, remarks = process.communicate(timeout=SECONDS_TO_END)
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, remarks))
    return ended


def alone(folder: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["generate", "--model", str(folder / "model"), *options])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_first_process_alone_writes_what_one_process_answers(folder: Path):
    document, file = ["--document", str(folder / "report.txt")], str(folder / "together.kv")
    first, second = run_together(folder, *document, *QUESTION, "--save-cache", file)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == alone(folder, *document, *QUESTION, "--cache", "dynamic")
    assert second.stdout == ""
    assert "2 processes keep a share of the cache each" in first.stderr
    assert alone(folder, "--load-cache", file, *QUESTION) == first.stdout


@pytest.mark.slow
def test_what_several_processes_have_saved_several_load(folder: Path):
    file = str(folder / "together.kv")
    first, _ = run_together(folder, "--document", str(folder / "report.txt"), *QUESTION, "--save-cache", file)
    again, _ = run_together(folder, "--load-cache", file, *QUESTION)
    assert again.stdout == first.stdout != ""


@pytest.mark.slow
def test_what_one_process_has_saved_several_load(folder: Path):
    file = str(folder / "alone.kv")
    answer = alone(folder, "--document", str(folder / "report.txt"), *QUESTION, "--save-cache", file)
    first, _ = run_together(folder, "--load-cache", file, *QUESTION)
    assert first.stdout == answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "--cache", "offloaded"],
            "--cache offloaded is for one process: with torchrun use one of",
        ),
        (["generate", "--compare"], "--compare is for one process: start it without torchrun"),
        (["generate", "--document", "-", *QUESTION], "Standard input is read by one process"),
        (["chat"], "chat runs in one process: start it without torchrun"),
        (
            ["batch", "questions.jsonl", "--out", "answers.jsonl"],
            "batch runs in one process: start it without",
        ),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"rank 1: error: {message}" in result.stderr


def test_processes_of_one_machine_take_nodes_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    monkeypatch.setattr("hf_hybrid_cache.cli.options.bind_to_node", taken.append)
    from hf_hybrid_cache.cli.options import run_on_node

    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        run_on_node("1")
    assert taken == [1, 2, 3]
