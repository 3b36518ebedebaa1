"""Several processes and threads on one folder, some of which end in the middle of something."""

import contextlib
import errno
import os
import signal
import sqlite3
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hf_hybrid_cache.prefix_store import private_files
from hf_hybrid_cache.prefix_store.errors import (
    NodeInUseError,
    NodeNotFoundError,
    PrefixStoreFolderError,
    PrefixStoreFullError,
)
from hf_hybrid_cache.prefix_store.folder import Folder

from common.programs import command, environment
from common.soak import budget, count
from store_folder.stored import (
    IDENTITY,
    Tokens,
    add,
    bytes_of_nodes,
    check,
    check_whole,
    found,
    keep,
    keys_of,
    num_found,
    open_folder,
    random_prompt,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs locks of the system, and signals")
MAX_BYTES = 60_000
PROMPT: Tokens = tuple(range(200))


class User:
    """
    A process that calls a function of this module with the folder; told by a line, and telling by lines.

        with User(path, read_slowly) as user:
            assert user.tells() == "200"
            user.is_told()
    """

    def __init__(self, path: Path, function: Any, *arguments: Any):
        given = ", ".join(map(repr, (str(path), *arguments)))
        program = f"from store_folder import test_processes as t; t.{function.__name__}({given})"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command(program), env=environment(), stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> "User":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def tells(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def is_told(self) -> None:
        print(file=self.process.stdin, flush=True)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def tell(what: object) -> None:
    print(what, flush=True)


def use_at_random(path: str, seed: int, steps: int) -> None:
    """Use a folder by two threads, and tell of each step when it is done."""
    user = open_folder(Path(path), MAX_BYTES)

    def use(own_seed: int) -> None:
        random = Random(own_seed)
        for number in range(steps // 2):
            step(user, random)
            tell(number)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(use, (seed, seed + 100)))


def step(user: Folder, random: Random) -> None:
    """Find a prompt, keep one, or remove one, beside others that do the same."""
    same, prompts = Random(0), list[Tokens]()
    for _ in range(12):
        prompts.append(random_prompt(same, prompts))
    tokens, whole_nodes = random.choice(prompts)[: random.randint(1, 500)], random.random() < 0.5
    # A node may be in use, removed by another one, or without room.
    with contextlib.suppress(NodeInUseError, NodeNotFoundError, PrefixStoreFullError):
        if random.random() < 0.4:
            with user.find(IDENTITY, keys_of(tokens), whole_nodes) as match:
                for _ in range(3):
                    check(match, tokens, whole_nodes=whole_nodes)
        elif random.random() < 0.8:
            keep(user, tokens, whole_nodes=whole_nodes)
        elif entries := user.entries():
            user.remove(random.choice(entries).node.name)


@pytest.mark.soak
def test_processes_with_threads_when_one_is_killed_then_all_is_right(path: Path):
    steps = budget(500, 5000)
    with contextlib.ExitStack() as stack:
        lost, *others = [stack.enter_context(User(path, use_at_random, seed, steps)) for seed in range(3)]
        for _ in range(20):
            lost.tells()
        lost.end()
        for user in others:
            assert user.process.wait(timeout=600) == 0
        assert lost.process.returncode == -signal.SIGKILL
    check_whole(path)
    assert bytes_of_nodes(path) <= MAX_BYTES
    count("steps of processes on one prefix store", 2 * steps)


def find_when_told(path: str) -> None:
    user = open_folder(Path(path))
    warnings.simplefilter("ignore")
    while True:
        tell(num_found(user, PROMPT))
        input()


@pytest.mark.soak
def test_database_when_damaged_then_several_processes_make_it_again(path: Path):
    keep(open_folder(path), PROMPT)
    with contextlib.ExitStack() as stack:
        users = [stack.enter_context(User(path, find_when_told)) for _ in range(3)]
        for number in range(budget(200, 5000)):
            assert [each.tells() for each in users] == ["200"] * 3, number
            (path / "prompts.sqlite").write_bytes(b"x" * 5000 * (number % 2))
            for each in users:
                each.is_told()


def hold_lock(path: str, how: str) -> None:
    """Stop within a transaction."""
    with contextlib.closing(sqlite3.connect(Path(path, "prompts.sqlite"))) as connection:
        connection.execute(f"BEGIN {how}")
        tell("locked")
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("how", ["IMMEDIATE", "EXCLUSIVE"])
def test_process_that_is_stopped_with_the_lock_is_told_of(how: str, path: Path):
    user = open_folder(path, lock_seconds=0.05)
    keep(user, PROMPT)
    with User(path, hold_lock, how) as other:
        assert other.tells() == "locked"
        with pytest.raises(PrefixStoreFolderError, match=r"locked by another process for 0\.05 s"):
            keep(user, (*PROMPT, 1))
        if how == "IMMEDIATE":
            assert num_found(user, PROMPT) == 200  # a search needs no lock
    assert keep(user, (*PROMPT, 1))


def read_slowly(path: str) -> None:
    """Use a prompt until told to end."""
    with found(open_folder(Path(path)), PROMPT) as match:
        tell(match.num_tokens)
        input()


def test_process_that_reads_keeps_its_prompt_until_it_ends(path: Path):
    user = open_folder(path)
    keep(user, PROMPT)
    name = user.entries()[0].node.name
    with User(path, read_slowly) as other:
        assert other.tells() == "200"
        with pytest.raises(NodeInUseError):
            user.remove(name)
    user.remove(name)


def write_slowly(path: str) -> None:
    """Keep a prompt, but wait in the middle until told to go on; tell the name."""

    def wait() -> None:
        tell("writing")
        input()

    tell(add(open_folder(Path(path)), PROMPT, 0, meanwhile=wait))


def test_prompt_when_kept_by_two_at_once_then_is_there_once(path: Path):
    with User(path, write_slowly) as other, User(path, write_slowly) as lost:
        assert other.tells() == lost.tells() == "writing"
        assert num_found(open_folder(path), PROMPT) == 0
        lost.end()
        assert keep(open_folder(path), PROMPT)
        (unfinished,) = (path / "unfinished").iterdir()
        other.is_told()
        (file,) = (path / "nodes").iterdir()
        assert other.tells() == file.stem != unfinished.name
        assert other.process.wait() == 0
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
