"""Ctrl-C while a command runs, and the objects that it leaves half-made."""

import signal
import sys
import time

import pytest

from hf_hybrid_cache.cli.interrupts import as_exceptions

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class HalfMade:
    def __init__(self):
        signal.raise_signal(signal.SIGINT)
        self.resource = None

    def __del__(self):
        assert self.resource is None


class InterruptedAtItsEnd:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


class FailsAtItsEnd:
    def __del__(self):
        raise OSError("not released")


def end_interrupted_and_wait():
    InterruptedAtItsEnd()
    for _ in range(1000):
        time.sleep(0.01)


def test_an_object_that_an_interrupt_left_half_made_says_nothing(capsys):
    with pytest.raises(KeyboardInterrupt), as_exceptions():
        HalfMade()
    assert capsys.readouterr().err == ""


def test_an_interrupt_of_a_destructor_is_raised():
    with pytest.raises(KeyboardInterrupt), as_exceptions():
        end_interrupted_and_wait()


def test_other_failures_of_destructors_are_reported_as_before(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_type))
    report = sys.unraisablehook
    with as_exceptions():
        FailsAtItsEnd()
    assert reported == [OSError]
    assert sys.unraisablehook is report
