"""The start of a command, and its end by Ctrl-C: with exit code 130 and no traceback."""

import io
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import hf_hybrid_cache
from hf_hybrid_cache import HostMemoryError
from hf_hybrid_cache.cli import let_waiting_threads_sleep
from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.cli.console import consoles, exit_codes, write
from hf_hybrid_cache.errors import HybridCacheError

HEAVY = {"torch", "transformers", "numba"}
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")

# The main thread waits for a thread that computes, as it does while a model answers.
WAITING = """
import queue, signal, threading
from hf_hybrid_cache.cli import let_waiting_threads_sleep
from hf_hybrid_cache.cli.console import end_at_interrupt, raising_interrupts
signal.signal(signal.SIGINT, signal.{handler})
end_at_interrupt()
def compute():
    signal.raise_signal(signal.SIGINT)
    while True: sum(range(100_000))
print("answer", end="")
try:
    with {context}:
        threading.Thread(target=compute, daemon=True).start()
        queue.Queue().get(timeout={timeout})
except (KeyboardInterrupt, queue.Empty) as error:
    print(type(error).__name__, end="")
"""


def ended(handler: str = "default_int_handler", context: str = "threading.Lock()", timeout: int = 60) -> tuple:
    program = WAITING.format(handler=handler, context=context, timeout=timeout)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@needs_signals
def test_interrupt_when_a_thread_computes_then_the_process_ends_at_once():
    assert ended() == (130, "answer", "")


@needs_signals
def test_interrupt_when_a_conversation_takes_it_then_is_an_exception():
    assert ended(context="raising_interrupts()") == (0, "answerKeyboardInterrupt", "")


@needs_signals
def test_interrupt_when_a_shell_has_it_ignored_then_does_nothing():
    assert ended(handler="SIG_IGN", timeout=1) == (0, "answerEmpty", "")


@needs_signals
def test_interrupt_when_it_is_an_exception_then_exit_code_is_130():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(typer.Exit) as ending, exit_codes(consoles()[1]):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert ending.value.exit_code == 130


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "store missing",
        "generate --bits 5",
        "chat --top-k 0 --temperature 1",
        "batch q.jsonl --out - --bits 5",
    ],
)
def test_command_when_its_options_are_wrong_then_nothing_heavy_is_imported(arguments: str):
    program = f"""
import sys
from hf_hybrid_cache.cli import main
sys.argv[1:] = {arguments.split()!r}
try:
    main()
except SystemExit:
    print("imported", *{HEAVY!r} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1].strip() == "imported", done.stderr


@pytest.mark.parametrize(
    ("busy", "load", "given", "spins"),
    [
        (1.0, 1.0, {}, "0"),
        (1.0, 0.1, {}, None),
        (0.1, 1.0, {}, None),
        (math.nan, 1.0, {}, None),
        (1.0, math.nan, {}, None),
        (1.0, 1.0, {"GOMP_SPINCOUNT": "9"}, "9"),
        (1.0, 1.0, {"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_waiting_threads_when_others_are_busy_then_sleep_unless_chosen(
    busy: float, load: float, given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    let_waiting_threads_sleep(busy, load)
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full and a POSIX shell")
@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (">&-", "error: Standard output is closed, and answers go there: let it go to /dev/null.\n"),
        ("> /dev/full", "error: No space left on device.\n"),
    ],
)
def test_a_stream_that_is_closed_or_full_is_a_sentence(stream: str, message: str):
    command = f"exec {sys.executable} -m hf_hybrid_cache.cli --version {stream}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, message)


def test_version_and_help_are_printed():
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == hf_hybrid_cache.__version__
    assert "--compare" in CliRunner().invoke(app, ["generate", "--help"]).stdout


def test_without_the_extra_the_command_says_how_to_get_it():
    program = "import sys; sys.modules['typer'] = None; from hf_hybrid_cache.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == 'The hf-hybrid-cache command needs typer: pip install "hf_hybrid_cache[demo]"\n'


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HostMemoryError("2.0 GiB are needed and 1.0 GiB are free."), "2.0 GiB are needed"),
        (MemoryError(), "Out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "can't allocate memory"),
        (HybridCacheError("A title\x1b[2J"), "A title[2J"),
    ],
)
def test_error_when_a_user_can_help_it_then_is_a_line_and_exit_code_2(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(typer.Exit) as ending, exit_codes(consoles()[1]):
        raise error
    assert ending.value.exit_code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_error_when_it_is_one_of_ours_then_has_a_traceback():
    with pytest.raises(RuntimeError, match="shapes"), exit_codes(consoles()[1]):
        raise RuntimeError("shapes do not match")


def test_warning_when_a_command_runs_then_is_a_remark_of_its_own(capsys: pytest.CaptureFixture[str]):
    with warnings.catch_warnings(), exit_codes(consoles()[1]):
        warnings.simplefilter("always")
        warnings.warn("Decode steps are slow.", stacklevel=1)
    assert capsys.readouterr().err == "\nwarning: Decode steps are slow.\n"


def test_text_when_it_is_of_a_model_then_cannot_steer_the_terminal():
    written = io.StringIO()
    write(Console(file=written, force_terminal=True), "a\x1b[2Jb\x07[red]c[/red]\n\x9bd\t:smile:\u00a0é")
    assert written.getvalue() == "a[2Jb[red]c[/red]\nd\t:smile:\u00a0é"
