"""The start of a command, its end by Ctrl-C (exit code 130, no traceback), and what it says at a terminal or pipe."""

import io
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import typer
from rich.console import Console

from hf_hybrid_cache import HostMemoryError
from hf_hybrid_cache.cli import let_waiting_threads_sleep
from hf_hybrid_cache.cli.console import consoles, end_line, exit_codes, note, think, write
from hf_hybrid_cache.errors import HybridCacheError

from .terminals import Terminal

# The main thread waits for a thread that computes, as it does while a model answers.
WAITING = """
import os, queue, signal, threading
from hf_hybrid_cache.cli.console import end_at_interrupt, raising_interrupts
signal.signal(signal.SIGINT, signal.{handler})
end_at_interrupt()
def compute():
    os.kill(os.getpid(), signal.SIGINT)
    while True: sum(range(100_000))
print("answer", end="")
try:
    with {context}:
        threading.Thread(target=compute, daemon=True).start()
        queue.Queue().get(timeout={timeout})
except (KeyboardInterrupt, queue.Empty) as error:
    print(type(error).__name__, end="")
"""
WITHOUT_TYPER = "import sys; sys.modules['typer'] = None; from hf_hybrid_cache.cli import main; main()"
CLOSED = "error: Standard output is closed, and answers go there: let it go to /dev/null.\n"


def ended(*command: str) -> tuple[int, str, str]:
    """Run a command; return its exit code, and what it printed and said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize(
    ("handler", "context", "timeout", "end"),
    [
        ("default_int_handler", "threading.Lock()", 600, (130, "answer", "")),
        ("default_int_handler", "raising_interrupts()", 600, (0, "answerKeyboardInterrupt", "")),
        ("SIG_IGN", "threading.Lock()", 1, (0, "answerEmpty", "")),
    ],
    ids=["ends the process", "is an exception in a conversation", "does nothing where a shell has it ignored"],
)
def test_an_interrupt_comes_at_once_while_a_thread_computes(
    handler: str, context: str, timeout: int, end: tuple[int, str, str]
):
    assert ended(sys.executable, "-c", WAITING.format(handler=handler, context=context, timeout=timeout)) == end


def test_a_line_at_a_terminal_is_ended_by_an_interrupt():
    given = {"handler": "default_int_handler", "context": "threading.Lock()", "timeout": 600}
    with Terminal("-uc", WAITING.format(**given)) as terminal:
        assert terminal.wait_for("\n") == "answer"


@pytest.mark.parametrize(
    ("busy", "load", "given", "spins"),
    [
        (1.0, 1.0, {}, "0"),
        (1.0, 0.1, {}, None),
        (math.nan, 1.0, {}, None),
        (1.0, 1.0, {"GOMP_SPINCOUNT": "9"}, "9"),
        (1.0, 1.0, {"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_waiting_threads_sleep_where_others_are_busy_unless_chosen(
    busy: float, load: float, given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "environ", given)
    let_waiting_threads_sleep(busy, load)
    assert given.get("GOMP_SPINCOUNT") == spins


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full and a POSIX shell")
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("-m hf_hybrid_cache.cli --version >&-", 2, CLOSED),
        ("-m hf_hybrid_cache.cli --version > /dev/full", 2, "error: No space left on device.\n"),
        (f'-c "{WITHOUT_TYPER}"', 1, 'The hf-hybrid-cache command needs typer: pip install "hf_hybrid_cache[demo]"\n'),
    ],
    ids=["closed", "full", "without the extra"],
)
def test_a_command_that_cannot_begin_says_so_in_a_sentence(command: str, code: int, message: str):
    assert ended("sh", "-c", f"exec {sys.executable} {command}") == (code, "", message)


def test_an_error_that_a_user_can_help_is_a_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]):
    lines = {
        HostMemoryError("2.0 GiB are needed and 1.0 GiB are free."): "2.0 GiB are needed",
        MemoryError(): "Out of memory",
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"): "can't allocate memory",
        HybridCacheError("A title\x1b[2J"): "A title[2J",
        KeyboardInterrupt(): None,
    }
    for error, message in lines.items():
        with pytest.raises(typer.Exit) as ending, exit_codes(consoles()[1]):
            raise error
        shown = capsys.readouterr().err
        assert ending.value.exit_code == (2 if message else 130)
        assert shown.count("\n") == bool(message)
        assert (message or "") in shown
    with pytest.raises(RuntimeError, match="shapes"), exit_codes(consoles()[1]):
        raise RuntimeError("shapes do not match")
    with warnings.catch_warnings(), exit_codes(consoles()[1]):
        warnings.simplefilter("always")
        warnings.warn("Decode steps are slow.", stacklevel=1)
    assert capsys.readouterr().err == "warning: Decode steps are slow.\n"


def test_a_remark_within_an_answer_is_on_a_line_of_its_own(tmp_path: Path):
    path = tmp_path / "log"
    with path.open("a") as log, path.open("a") as same, (tmp_path / "other").open("w+") as other:
        out, notes, elsewhere = (Console(file=file, color_system=None) for file in (log, same, other))
        think(notes, "Who")
        note(notes, "went on")
        for text in ("Ada", " did"):
            write(out, text)
        note(elsewhere, "read")
        note(notes, "not kept")
        end_line(out)
        note(notes, "ended")
        end_line(out)
        assert path.read_text() == "Who\nwent on\nAda did\nnot kept\nended\n"
        assert (tmp_path / "other").read_text() == "read\n"


def test_remarks_are_plain_where_no_color_is_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for wanted, systems in (("", {"standard"}), ("1", {None})):
        monkeypatch.setenv("NO_COLOR", wanted)
        assert {each.color_system for each in consoles()} == systems


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal of POSIX")
def test_bars_of_other_libraries_vanish_from_the_terminal():
    program = """
import contextlib
from hf_hybrid_cache.cli import main
with contextlib.suppress(SystemExit):
    main()
from tqdm import tqdm
for _ in tqdm(range(3), desc="loading"):
    pass
print("ended")
"""
    with Terminal("-c", program, "--version") as terminal:
        shown = terminal.wait_for("ended")
    assert "loading: " in shown
    assert shown.count("\n") == 1  # after the version: a bar that stays has one, too


def test_a_text_of_a_model_cannot_steer_the_terminal():
    written = io.StringIO()
    write(Console(file=written, force_terminal=True), "a\x1b[2Jb\x07[red]c[/red]\n\x9bd\t:smile:\u00a0é")
    assert written.getvalue() == "a[2Jb[red]c[/red]\nd\t:smile:\u00a0é"


def test_help_at_a_narrow_terminal_has_all_names_of_options_whole():
    with Terminal("-m", "hf_hybrid_cache.cli", "chat", "--help", COLUMNS="60") as terminal:
        shown = terminal.wait_for("Show this message and")
    assert "…" not in shown
    assert "--max-thinking-tokens" in shown
    assert "<list" not in shown
