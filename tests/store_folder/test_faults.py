"""A change of a folder that ends anywhere leaves what was there, whole, and is done or not."""

import errno
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from hf_hybrid_cache.prefix_folder import PrefixStoreFolderError, files, folder, index_file, node_file, payload

from common.interruptions import Interruption
from common.programs import run_program
from common.soak import budget, count
from prefix_folder.trials import CHANGES, check, prepared

# A file that was being opened when the error came is closed when it is freed.
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


def no_space(message: str) -> OSError:
    return OSError(errno.ENOSPC, message)


def unreadable(message: str) -> OSError:
    return OSError(errno.EIO, message)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("error", [no_space, unreadable, KeyboardInterrupt])
def test_change_when_ended_at_any_line_then_is_done_or_not(error: Any, change: str, path: Path):
    counting = Interruption(error)
    prepared(path, change)
    counting.run(partial(CHANGES[change], path))
    for line in range(0, counting.lines, max(1, counting.lines // budget(100, 100_000))):
        prepared(path, change)
        interruption = Interruption(error, line)
        # A file that seems damaged goes with a warning.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            interruption.run(partial(CHANGES[change], path))
        assert interruption.place is not None
        try:
            check(path, change, may_lose=error is unreadable)
        except BaseException as failure:
            raise AssertionError(f"ended at {interruption.place}") from failure
        count("changes of a store of prompts ended")


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes, and kills them")
def test_process_when_killed_anywhere_then_leaves_a_whole_folder(path: Path):
    every = 61 if budget(5, 5) < 5 else 1
    run_program(f"from prefix_folder import trials; trials.kill_everywhere({str(path)!r}, {every})")
    count("changes of a store of prompts killed at every so many lines", len(CHANGES))


class FullDisk:
    """Takes so many bytes; of the write that is too long it takes a part."""

    def __init__(self, num_bytes: int, monkeypatch: pytest.MonkeyPatch):
        self.num_bytes = num_bytes
        for module in (folder, index_file, node_file, payload):
            monkeypatch.setattr(module, "write_all", self.write_all)

    def write_all(self, file: BinaryIO, data: Any) -> None:
        part = memoryview(data)[: self.num_bytes]
        self.num_bytes -= len(part)
        files.write_all(file, part)
        if len(part) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("change", ["fill", "add", "add_in_place_of_others", "make_index"])
def test_disk_when_full_at_any_byte_then_the_change_was_not(change: str, path: Path, monkeypatch: pytest.MonkeyPatch):
    number, num_bytes = budget(100, 2000), 0
    is_full = True
    while is_full:
        prepared(path, change)
        with monkeypatch.context() as patch:
            FullDisk(num_bytes, patch)
            is_full = fails_for_space(partial(CHANGES[change], path))
        check(path, change)
        num_bytes += 24_000 // number
    # Nodes and records of the last one that went well.
    assert num_bytes > 350


def fails_for_space(change: Callable[[], object]) -> bool:
    try:
        change()
    except PrefixStoreFolderError as error:
        if "No space left on device" not in str(error):
            raise
        return True
    return False
