"""Changes of a folder that end somewhere, and what must hold then; without torch, for processes that are forked."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import hf_hybrid_cache

from prefix_folder.stored import IDENTITY, Tokens, bytes_of_nodes, keep, num_found, open_folder

PACKAGE = str(Path(hf_hybrid_cache.__file__).parent)
OLD: list[Tokens] = [tuple(range(300)), (*range(200), *range(1000, 1100)), tuple(range(5000, 5100))]
NEW: Tokens = (*range(290), *range(2000, 2200))
# Their files have 5 KiB each, so that the new one needs the room of two.
MAX_BYTES = 13_000


def fill(path: Path) -> None:
    for tokens in OLD:
        keep(open_folder(path), tokens)


def add(path: Path) -> None:
    keep(open_folder(path), NEW)


def add_in_place_of_others(path: Path) -> None:
    keep(open_folder(path, MAX_BYTES), NEW)


def remove(path: Path) -> None:
    user = open_folder(path)
    with user.find(IDENTITY, OLD[0]) as match:
        own_id = match.parts[0].file.head.id
    user.remove(own_id)


def make_index(path: Path) -> None:
    (path / "index").unlink(missing_ok=True)
    num_found(open_folder(path), NEW)


CHANGES = {each.__name__: each for each in (fill, add, add_in_place_of_others, remove, make_index)}


def prepared(path: Path, change: str) -> None:
    """Make the folder as it is before a change; for the first it is not there yet."""
    shutil.rmtree(path, ignore_errors=True)
    if change != "fill":
        fill(path)


def check(path: Path, change: str, may_lose: bool = False) -> None:
    """
    Check that what is found is right, that all that should be there is, and that nothing is left over.

    No process may hold a lock: waiting for one would fail.

    Args:
        path: of the folder.
        change: that ended.
        may_lose: prompts may be missing, because files seemed damaged.
    """
    user = open_folder(path, lock_seconds=0)
    found = [num_found(user, tokens) for tokens in OLD]  # with all payloads
    of_new = num_found(user, NEW)
    if may_lose:
        pass
    elif change in ("add", "make_index"):
        assert found == [300, 300, 100], found
        assert of_new in (290, 490), of_new
    elif change == "add_in_place_of_others":
        # In the order of removal.
        assert (found, of_new) in [
            ([300, 300, 100], 290),
            ([300, 200, 100], 290),
            ([300, 200, 0], 290),
            ([300, 200, 0], 490),
        ], (found, of_new)
        assert of_new == 290 or bytes_of_nodes(path) <= MAX_BYTES
    elif change == "remove":
        assert found in ([300, 300, 100], [300, 200, 100], [0, 0, 100]), found
    assert user.damages() == {}
    assert not list((path / "unfinished").iterdir())
    # Files and index agree, and the store can be used on.
    assert len(user.entries()) == len(list((path / "nodes").iterdir()))
    assert len((path / "lock").read_bytes()) > 40
    for tokens in (*OLD, NEW):
        keep(user, tokens)
        assert num_found(user, tokens) == len(tokens)


def run_until(line: int, change: Callable[[], Any]) -> int:
    """Run a change in a process that is killed at a line of the package; return how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if event == "call":
            return trace if frame.f_code.co_filename.startswith(PACKAGE) else None
        if event == "line":
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
        return trace

    try:
        sys.settrace(trace)
        change()
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def kill_everywhere(folder: str, every: int) -> None:
    """Kill a process at every so many lines of each change."""
    path = Path(folder)
    for change in CHANGES:
        line, ended = 0, -signal.SIGKILL
        while ended == -signal.SIGKILL:
            prepared(path, change)
            ended = run_until(line, partial(CHANGES[change], path))
            try:
                check(path, change)
            except BaseException as error:
                raise AssertionError(f"killed at line {line} of {change}") from error
            line += every
        assert ended == 0, (change, line, ended)
        assert line > 100
