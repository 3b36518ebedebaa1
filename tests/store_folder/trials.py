"""
Changes of a folder that end somewhere, and what must hold then; without torch, for processes that are forked.

    prepared(path, "add")                        # the folder as it is before the change
    run_until(12, lambda: CHANGES["add"](path))  # a process makes it, and is killed before its 13th call of the system
    check(path, "add")                           # it was made or not, and all that was there is whole
"""

import ctypes
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from store_folder.stored import (
    BEGINNING,
    PROMPTS,
    Tokens,
    all_found,
    bytes_of_nodes,
    check_whole,
    fill,
    found,
    keep,
    num_found,
    open_folder,
)

NEW: Tokens = (*BEGINNING, *range(2000, 2290))
# Files of nodes have 5 to 8 KiB each, and the new one needs the room of two.
MAX_BYTES = 20_000
_TRACE_ME, _NEXT_CALL = 0, 24  # of ptrace


def remove(path: Path) -> None:
    user = open_folder(path)
    with found(user, BEGINNING) as match:
        name = match.nodes[0].name
    user.remove(name)


CHANGES: dict[str, Callable[[Path], object]] = {
    "fill": fill,
    "add": lambda path: keep(open_folder(path), NEW),
    "add_in_place_of_others": lambda path: keep(open_folder(path, MAX_BYTES), NEW),
    "remove": remove,
}
# How many tokens may be found then of the three prompts and the new one; `None` where any may be.
WAYS = {
    "fill": None,
    "add": [(300, 300, 100, 200), (300, 300, 100, 490)],
    # In the order of removal.
    "add_in_place_of_others": [(300, 300, 100, 200), (200, 300, 100, 200), (200, 200, 100, 200), (200, 200, 100, 490)],
    "remove": [(300, 300, 100, 200), (300, 200, 100, 200), (200, 200, 100, 200), (0, 0, 100, 0)],
}


def prepared(path: Path, change: str) -> None:
    """Make the folder as it is before a change; for the first it is not there yet."""
    shutil.rmtree(path, ignore_errors=True)
    if change != "fill":
        fill(path)


def check(path: Path, change: str, may_lose: bool = False) -> None:
    """
    Check that what is found is right, that all that should be there is, and that nothing is left over or warned of.

    Prompts may be missing where files seemed damaged. No process may hold a lock: waiting for one would fail.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        user = open_folder(path, lock_seconds=0)
        lengths = (*all_found(user), num_found(user, NEW))
    ways = None if may_lose else WAYS[change]
    assert ways is None or lengths in ways, lengths
    if change == "add_in_place_of_others" and lengths[-1] == len(NEW):
        assert may_lose or bytes_of_nodes(path) <= MAX_BYTES
    check_whole(path)
    for tokens in (*PROMPTS, NEW):
        keep(user, tokens)
        assert num_found(user, tokens) == len(tokens)


def run_until(call: int, change: Callable[[], Any]) -> int:
    """Run a change in a process that is killed before one of its calls of the system; return how it ended."""
    trace = ctypes.CDLL(None).ptrace
    if not (child := os.fork()):
        try:
            trace(_TRACE_ME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            change()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    _, status = os.waitpid(child, 0)
    for _ in range(2 * call + 1):  # it stops before each call and after it
        trace(_NEXT_CALL, child, None, None)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(folder: str, every: int) -> None:
    """Kill a process at every so many calls of the system in each change."""
    path = Path(folder)
    for change in CHANGES:
        call, result = 0, -signal.SIGKILL
        while result == -signal.SIGKILL:
            prepared(path, change)
            result = run_until(call, partial(CHANGES[change], path))
            try:
                check(path, change)
            except BaseException as error:
                raise AssertionError(f"killed at call {call} of {change}") from error
            call += every
        assert result == 0, (change, call, result)
        assert call > 100
