"""A change of a folder that ends anywhere leaves what was there, whole, and is done or not."""

import errno
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from store_folder.trials import CHANGES, check, prepared

from common.interruptions import Interruption
from common.programs import run_program
from common.soak import budget, count

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
        count("changes of a prefix store ended")


@pytest.mark.skipif(sys.platform != "linux", reason="stops processes at calls of the system")
def test_process_when_killed_at_any_call_then_leaves_a_whole_folder(path: Path):
    every = 29 if budget(5, 5) < 5 else 1
    run_program(f"from store_folder import trials; trials.kill_everywhere({str(path)!r}, {every})")
    count("changes of a prefix store killed at every so many calls", len(CHANGES))
