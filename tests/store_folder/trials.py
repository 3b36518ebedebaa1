"""Changes of a folder that end somewhere, and what must hold then; without torch, for processes that are forked."""

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

from store_folder.stored import Tokens, bytes_of_nodes, found, keep, num_found, open_folder

OLD: list[Tokens] = [tuple(range(300)), (*range(200), *range(1000, 1100)), tuple(range(5000, 5100))]
NEW: Tokens = (*range(290), *range(2000, 2200))
# Files of nodes have 5 to 8 KiB each, and the new one needs the room of two.
MAX_BYTES = 18_000
_TRACE_ME, _NEXT_CALL = 0, 24  # of ptrace


def fill(path: Path) -> None:
    for tokens in OLD:
        keep(open_folder(path), tokens)


def add(path: Path) -> None:
    keep(open_folder(path), NEW)


def add_in_place_of_others(path: Path) -> None:
    keep(open_folder(path, MAX_BYTES), NEW)


def remove(path: Path) -> None:
    user = open_folder(path)
    with found(user, OLD[0]) as match:
        name = match.parts[0].node.name
    user.remove(name)


def make_database(path: Path) -> None:
    (path / "prompts.sqlite").unlink(missing_ok=True)
    num_found(open_folder(path), NEW)


CHANGES = {each.__name__: each for each in (fill, add, add_in_place_of_others, remove, make_database)}


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
        lengths = [num_found(user, tokens) for tokens in OLD]  # with all states
        of_new = num_found(user, NEW)
    if may_lose:
        pass
    elif change in ("add", "make_database"):
        assert lengths == [300, 300, 100], lengths
        assert of_new in (290, 490), of_new
    elif change == "add_in_place_of_others":
        # In the order of removal.
        ways = ([300, 300, 100], 290), ([300, 200, 100], 290), ([300, 200, 0], 290), ([300, 200, 0], 490)
        assert (lengths, of_new) in ways, (lengths, of_new)
        assert of_new == 290 or bytes_of_nodes(path) <= MAX_BYTES
    elif change == "remove":
        assert lengths in ([300, 300, 100], [300, 200, 100], [0, 0, 100]), lengths
    check_whole(path)
    for tokens in (*OLD, NEW):
        keep(user, tokens)
        assert num_found(user, tokens) == len(tokens)


def check_whole(path: Path) -> None:
    """Check that no file is damaged or left over, and that database and files agree."""
    user = open_folder(path, lock_seconds=0)
    assert user.damages() == {}
    assert not list((path / "unfinished").iterdir())
    assert {entry.node.name for entry in user.entries()} == {each.stem for each in (path / "nodes").iterdir()}
    assert not (path / "prompts.sqlite-journal").exists()


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
