"""A change of a folder that ends anywhere leaves what was there, whole, and is done or not."""

import errno
import gc
import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache.prefix_store.errors import PrefixStoreFolderError

from common.interruptions import Interruption
from common.limits import limited
from common.programs import run_program
from common.soak import budget, count
from store_folder.stored import LENGTHS, all_found, fill, keep, open_folder
from store_folder.trials import CHANGES, check, prepared

# A file that was being opened when the error came is closed when it is freed.
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
ERRORS: dict[str, Any] = {
    "no space": partial(OSError, errno.ENOSPC),
    "unreadable": partial(OSError, errno.EIO),
    "Ctrl-C": KeyboardInterrupt,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("error", ERRORS)
def test_change_when_ended_at_any_line_then_is_done_or_not(error: str, change: str, path: Path):
    act, counting = partial(CHANGES[change], path), Interruption(ERRORS[error])
    prepared(path, change)
    counting.run(act)
    for line in range(0, counting.lines, max(1, counting.lines // budget(12))):
        prepared(path, change)
        interruption = Interruption(ERRORS[error], line)
        # A file that seems damaged goes with a warning.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            interruption.run(act)
        assert interruption.place is not None
        try:
            check(path, change, may_lose=error == "unreadable")
        except BaseException as failure:
            raise AssertionError(f"ended at {interruption.place}") from failure
        count("changes of a prefix store ended")
    gc.collect()  # files that wait for it are closed within this module, which lets them


@pytest.mark.skipif(sys.platform != "linux", reason="stops processes at calls of the system")
def test_process_when_killed_at_any_call_then_leaves_a_whole_folder(path: Path):
    every = 11 if budget(1) == 1 else 1
    run_program(f"from store_folder import trials; trials.kill_everywhere({str(path)!r}, {every})")
    count("changes of a prefix store killed at every so many calls", len(CHANGES))


@pytest.mark.parametrize("change", ["fill", "add", "add_in_place_of_others"])
def test_change_when_files_cannot_grow_then_was_not(change: str, path: Path):
    results = []
    for num_bytes in range(0, 50_000, 50_000 // budget(20)):
        prepared(path, change)
        with limited("RLIMIT_FSIZE", num_bytes):
            try:
                CHANGES[change](path)
                results.append(True)
            except PrefixStoreFolderError as error:
                results.append(False)
                if not re.search("has no room|File too large", str(error)):
                    raise
        check(path, change)
    assert results == sorted(results)
    assert set(results) == {False, True}


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a disk")
def test_folder_when_it_cannot_be_written_then_prompts_are_found(tmp_path: Path):
    def mount(options: str) -> None:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path], capture_output=True).returncode:
            pytest.skip("may not mount")

    mount("size=1m")
    try:
        fill(tmp_path / "store")
        mount("remount,ro")
        user = open_folder(tmp_path / "store")
        assert all_found(user) == LENGTHS
        with pytest.raises(PrefixStoreFolderError, match="cannot be changed: Read-only file system"):
            keep(user, (1,))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for the names of open files")
def test_changes_when_made_then_are_on_the_disk_in_order(path: Path, monkeypatch: pytest.MonkeyPatch):
    user, events = open_folder(path), list[str]()

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(file: Any, *others: Any, **options: Any) -> Any:
            place = Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file)
            if name == "fsync" or os.path.exists(file):
                events.append(f"{name} {place.suffix or 'folder'}")
            return function(file, *others, **options)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
        watch(owner, name)
    keep(user, tuple(range(100)))
    assert events == ["fsync .unfinished", "replace .unfinished", "fsync folder"]
    events.clear()
    user.remove(user.prompts()[0][-1][0].name)
    assert events == ["unlink .safetensors", "fsync folder"]
