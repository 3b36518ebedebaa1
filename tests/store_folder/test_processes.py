"""Several processes and threads on one folder, some of which end in the middle of something."""

import contextlib
import errno
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hf_hybrid_cache.prefix_store import private_files
from hf_hybrid_cache.prefix_store.errors import NodeInUseError, PrefixStoreFolderError

from common.soak import budget, count
from store_folder.stored import bytes_of_nodes, found, keep, num_found, open_folder
from store_folder.trials import check_whole
from store_folder.users import MAX_BYTES, PROMPT, started, step

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs locks of the system, and signals")


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.soak
def test_processes_on_one_folder_when_one_is_killed_then_all_is_right(path: Path):
    steps = budget(500, 5000)
    with contextlib.ExitStack() as stack:
        calls = [f"use_at_random({str(path)!r}, {seed}, {steps})" for seed in range(3)]
        lost, *others = [stack.enter_context(started(call)) for call in calls]
        for _ in range(20):
            told(lost)
        lost.kill()
        for process in others:
            assert process.wait(timeout=600) == 0
        assert lost.wait() != 0
    check_whole(path)
    assert bytes_of_nodes(path) <= MAX_BYTES
    count("steps of processes on one prefix store", 2 * steps)


def test_threads_with_one_folder_find_what_is_right(path: Path):
    user = open_folder(path, MAX_BYTES)

    def use(seed: int) -> None:
        random = Random(seed)
        for _ in range(budget(150, 2000)):
            step(user, random)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(use, range(3)))
    check_whole(path)
    assert bytes_of_nodes(path) <= MAX_BYTES


@pytest.mark.soak
def test_database_when_damaged_then_several_processes_make_it_again(path: Path):
    keep(open_folder(path), PROMPT)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(f"find_when_told({str(path)!r})")) for _ in range(3)]
        for number in range(budget(200, 5000)):
            assert [told(each) for each in processes] == ["200"] * 3, number
            (path / "prompts.sqlite").write_bytes(b"x" * 5000 * (number % 2))
            for each in processes:
                tell(each)


@pytest.mark.parametrize("how", ["IMMEDIATE", "EXCLUSIVE"])
def test_process_that_is_stopped_with_the_lock_is_told_of(how: str, path: Path):
    user = open_folder(path, lock_seconds=0.05)
    keep(user, PROMPT)
    with started(f"hold_lock({str(path)!r}, {how!r})") as process:
        assert told(process) == "locked"
        with pytest.raises(PrefixStoreFolderError, match=r"locked by another process for 0\.05 s"):
            keep(user, (*PROMPT, 1))
        if how == "IMMEDIATE":
            assert num_found(user, PROMPT) == 200  # a search needs no lock
    assert keep(user, (*PROMPT, 1))


def test_process_that_reads_keeps_its_prompt_until_it_ends(path: Path):
    user = open_folder(path)
    keep(user, PROMPT)
    name = user.entries()[0].node.name
    with started(f"read_slowly({str(path)!r})") as process:
        assert told(process) == "200"
        with pytest.raises(NodeInUseError):
            user.remove(name)
        tell(process)
        assert process.wait() == 0
    user.remove(name)


def test_prompt_when_kept_by_two_at_once_then_is_there_once(path: Path):
    calls = [f"write_slowly({str(path)!r})"] * 2
    with started(calls[0]) as process, started(calls[1]) as lost:
        assert told(process) == told(lost) == "writing"
        assert num_found(open_folder(path), PROMPT) == 0
        lost.kill()
        lost.wait()
        assert keep(open_folder(path), PROMPT)
        (unfinished,) = (path / "unfinished").iterdir()
        tell(process)
        (file,) = (path / "nodes").iterdir()
        assert told(process) == file.stem != unfinished.name
        assert process.wait() == 0
    check_whole(path)
    assert [*(path / "nodes").iterdir()] == [file]


def test_folder_without_locks_still_finds_what_is_right(path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(private_files.fcntl, "flock", flock)
    user, other, random = open_folder(path, MAX_BYTES), open_folder(path, MAX_BYTES), Random(0)
    for _ in range(100):
        step(random.choice((user, other)), random)
    keep(user, PROMPT)
    with found(user, PROMPT) as match:
        other.remove(match.parts[0].node.name)  # nobody can tell that it is in use
    (path / "unfinished" / ("0" * 32)).write_text("may be written")
    assert keep(open_folder(path), PROMPT)
    (path / "unfinished" / ("0" * 32)).unlink()  # nor that nobody writes
    check_whole(path)
