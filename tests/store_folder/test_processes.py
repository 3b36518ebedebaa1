"""Several processes and threads on one folder, some of which end in the middle of something."""

import contextlib
import errno
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hf_hybrid_cache.prefix_folder import NodeInUseError, PayloadWriter, PrefixStoreFolderError, locks

from common.soak import budget, count
from prefix_folder.stored import (
    IDENTITY,
    bytes_of_nodes,
    keep,
    num_found,
    open_folder,
    payload_of,
)
from prefix_folder.users import MAX_BYTES, PROMPT, start, step

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs locks of the system, and signals")


@contextlib.contextmanager
def started(call: str) -> Iterator[subprocess.Popen[str]]:
    with start(call) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def check_all(path: Path) -> None:
    user = open_folder(path, lock_seconds=0)
    assert user.damages() == {}
    assert not list((path / "unfinished").iterdir())
    assert len(user.entries()) == len(list((path / "nodes").iterdir()))
    assert bytes_of_nodes(path) <= MAX_BYTES


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
    check_all(path)
    count("steps of processes on one store of prompts", 2 * steps)


def test_threads_with_one_folder_find_what_is_right(path: Path):
    user = open_folder(path, MAX_BYTES)

    def use(seed: int) -> None:
        random = Random(seed)
        for _ in range(budget(150, 2000)):
            step(user, random)

    with ThreadPoolExecutor(3) as pool:
        for result in [pool.submit(use, seed) for seed in range(3)]:
            result.result()
    check_all(path)


def test_process_that_is_stopped_with_the_lock_is_told_of(path: Path):
    user = open_folder(path, lock_seconds=0.05)
    keep(user, PROMPT)
    with started(f"hold_lock({str(path)!r})") as process:
        assert told(process) == "locked"
        with pytest.raises(PrefixStoreFolderError, match=r"locked by another process for 0\.05 s"):
            keep(user, (*PROMPT, 1))
        assert num_found(user, PROMPT) == 200  # a search needs no lock
    assert keep(user, (*PROMPT, 1))


def test_process_that_reads_keeps_its_prompt_until_it_ends(path: Path):
    user = open_folder(path)
    keep(user, PROMPT)
    entry = user.entries()[0]
    with started(f"read_slowly({str(path)!r})") as process:
        assert told(process) == "200"
        with pytest.raises(NodeInUseError):
            user.remove(entry.id)
        tell(process)
        assert process.wait() == 0
    user.remove(entry.id)


def test_file_being_written_stays_until_its_process_ends(path: Path):
    with started(f"write_slowly({str(path)!r})") as process:
        assert told(process) == "writing"
        assert num_found(open_folder(path), PROMPT) == 0
        assert len(list((path / "unfinished").iterdir())) == 1
    open_folder(path)
    assert not list((path / "unfinished").iterdir())


def test_prompt_when_written_by_two_at_once_then_is_there_once(path: Path):
    with started(f"write_slowly({str(path)!r})") as process:
        assert told(process) == "writing"
        assert keep(open_folder(path), PROMPT)
        tell(process)
        (node,) = path.rglob("*.node")
        assert told(process) == node.stem
        assert process.wait() == 0
    assert len(list(path.rglob("*.node"))) == 1
    check_all(path)


def test_folder_without_locks_still_finds_what_is_right(path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    user, other, random = open_folder(path, MAX_BYTES), open_folder(path, MAX_BYTES), Random(0)
    for _ in range(100):
        step(random.choice((user, other)), random)
    keep(user, PROMPT)
    with user.find(IDENTITY, PROMPT) as match:
        other.remove(match.parts[0].file.head.id)  # nobody can tell that it is in use

    def write(file: PayloadWriter) -> None:
        open_folder(path)
        assert len(list((path / "unfinished").iterdir())) == 1  # nor that nobody writes
        file.write(payload)

    payload = payload_of(PROMPT, 0)
    assert user.add(IDENTITY, PROMPT, 0, len(payload), write)
    check_all(path)
