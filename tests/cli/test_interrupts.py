"""Ctrl-C ends a command with exit code 130 and no traceback."""

import signal
import subprocess
import sys

import pytest
import typer

from hf_hybrid_cache.cli.console import consoles, exit_codes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")

# The main thread waits for a thread that computes, as it does while a model answers.
WAITING = """
import queue, signal, threading
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


def test_interrupt_when_a_thread_computes_then_the_process_ends_at_once():
    assert ended() == (130, "answer", "")


def test_interrupt_when_a_conversation_takes_it_then_is_an_exception():
    assert ended(context="raising_interrupts()") == (0, "answerKeyboardInterrupt", "")


def test_interrupt_when_a_shell_has_it_ignored_then_does_nothing():
    assert ended(handler="SIG_IGN", timeout=1) == (0, "answerEmpty", "")


def test_interrupt_when_it_is_an_exception_then_exit_code_is_130():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(typer.Exit) as ending, exit_codes(consoles()[1]):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert ending.value.exit_code == 130
