"""Finding the processes that are missing after a collective has failed: those that are left sign in a store."""

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Self
from weakref import WeakSet

from torch import distributed

# A process may be computing and not have noticed yet; once all but one have signed there is no need to wait.
_SECONDS_TO_SIGN = 30.0
# The others read the result before the process that holds the store may end.
_SECONDS_TO_READ = 2.0
# The store itself must answer in this time.
_SECONDS_TO_ANSWER = 5.0
_PAUSE = 0.02
# The store has other keys too.
_PREFIX = "hf_hybrid_cache"
_CALLED = f"{_PREFIX} called"
_SECONDS_BETWEEN_QUESTIONS = 0.5
# The wait for an answer when the process ends.
_SECONDS_AT_THE_END = 1.0

_asking: WeakSet[threading.Thread] = WeakSet()


def absent_ranks(store: "distributed.Store", rank: int, size: int) -> list[int]:
    """
    Return the ranks that have not signed in the group's store after half a minute, or once only one is missing.

    Args:
        store: that all processes of the group have.
        rank: of this process, which signs.
        size: of the group.

    Returns:
        Their ranks; the first one, which keeps the store unless `torchrun` does, if the store does not answer either.
    """
    call = _RollCall(store, rank, size)
    # If the store's process was stopped, no answer comes, not even an error.
    asking = _beside(call.ask)
    if call.has_answered.wait(_SECONDS_TO_ANSWER):
        asking.join(_SECONDS_TO_SIGN + 2 * _SECONDS_TO_READ)
    return call.absent


class Alarm:
    """
    Notices, while this process waits for others, that one of them has called the roll. A context manager.

    gloo waits for one process after the other, and does not see that another one has ended meanwhile. The store is
    asked by a thread, because one whose process was stopped never answers.

    Attributes:
        is_raised: set when it has.
    """

    def __init__(self, store: "distributed.Store"):
        self._store = store
        self._is_over = threading.Event()
        self.is_raised = threading.Event()

    def __enter__(self) -> Self:
        _beside(self._watch)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended, which gloo will notice
            while not self._is_over.wait(_SECONDS_BETWEEN_QUESTIONS):
                if self._store.check([_CALLED]):
                    self.is_raised.set()
                    return


class _RollCall:
    """
    A roll call, from the view of one process.

    Attributes:
        absent: who has not signed; the first one, unless it is this one, until the store has answered.
        has_answered: set once the store has.
    """

    def __init__(self, store: "distributed.Store", rank: int, size: int):
        self._store, self._rank = store, rank
        self._others = [each for each in range(size) if each != rank]
        self.absent = [0] if rank else []
        self.has_answered = threading.Event()

    def ask(self) -> None:
        """Sign, and wait for the signatures of the others."""
        try:
            self._store.set(_CALLED, "yes")
            self._write("signed")
            self._missing("signed", self._others)  # an answer, whichever
            self.has_answered.set()
            self.absent = _until(lambda: self._missing("signed", self._others), 1, _SECONDS_TO_SIGN)
            self._write("read")
            signed = [each for each in self._others if each not in self.absent]
            _until(lambda: self._missing("read", signed), 0, _SECONDS_TO_READ)
        except RuntimeError:  # the process that keeps it has ended
            self.has_answered.set()

    def _write(self, word: str) -> None:
        self._store.set(f"{_PREFIX} {word} {self._rank}", "yes")

    def _missing(self, word: str, ranks: list[int]) -> list[int]:
        return [each for each in ranks if not self._store.check([f"{_PREFIX} {word} {each}"])]


def _until(missing: Callable[[], list[int]], number: int, seconds: float) -> list[int]:
    """Call `missing` until its result has at most `number` entries, or time is up; return it."""
    end = time.monotonic() + seconds
    while len(found := missing()) > number and time.monotonic() < end:
        time.sleep(_PAUSE)
    return found


def _beside(ask: Callable[[], None]) -> threading.Thread:
    """Start a thread that asks a store."""
    _let_the_end_wait()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    _asking.add(thread)
    return thread


@cache
def _let_the_end_wait() -> None:
    """Wait for threads at exit: one that returns from torch after the interpreter has gone aborts the process."""
    atexit.register(_end)


def _end() -> None:
    """Wait a moment for each thread: one that asks a store which does not answer never returns."""
    for thread in list(_asking):
        thread.join(_SECONDS_AT_THE_END)
