"""Several processes and threads on one folder, of which one is killed, holds the lock, or gets no locks."""

import contextlib
import errno
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
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

from common.soak import budget, count
from store_folder.stored import (
    IDENTITY,
    NODES,
    Tokens,
    add,
    bytes_of_nodes,
    check,
    check_whole,
    files_of,
    found,
    keep,
    keys_of,
    nodes_of,
    num_found,
    open_folder,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs locks of the system, and signals")
SPAWN = get_context("spawn")
MAX_BYTES = 60_000
PROMPT: Tokens = tuple(range(200))


def step(user: Folder, random: Random) -> None:
    """Find a prompt, keep one, or remove one, beside others that do the same."""
    tokens = PROMPT[: random.randrange(0, 200, 50)] + (random.randrange(3),) * random.randint(1, 300)
    # A node may be in use, removed by another one, or without room.
    with contextlib.suppress(NodeInUseError, NodeNotFoundError, PrefixStoreFullError):
        if random.random() < 0.4:
            with user.find(IDENTITY, keys_of(tokens)) as match:
                for _ in range(3):
                    check(match, tokens)
        elif random.random() < 0.8:
            keep(user, tokens)
        elif nodes := [*nodes_of(user.path)]:
            user.remove(random.choice(nodes).name)


def use_at_random(path: Path, seed: int, steps: int, done: Any) -> None:
    """Use a folder by two threads; each step that is done releases a semaphore."""
    user = open_folder(path, MAX_BYTES)

    def use(own_seed: int) -> None:
        random = Random(own_seed)
        for _ in range(steps // 2):
            step(user, random)
            done.release()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(use, (seed, seed + 100)))


@pytest.mark.soak
def test_processes_with_threads_when_one_is_killed_then_all_is_right(path: Path):
    steps, done = budget(100), [SPAWN.Semaphore(0) for _ in range(3)]
    users = [SPAWN.Process(target=use_at_random, args=(path, seed, steps, done[seed])) for seed in range(3)]
    for user in users:
        user.start()
    for _ in range(20):
        assert done[0].acquire(timeout=600)
    users[0].kill()
    for user in users:
        user.join(600)
    assert [user.exitcode for user in users] == [-signal.SIGKILL, 0, 0]
    check_whole(path)
    assert bytes_of_nodes(path) <= MAX_BYTES
    count("steps of processes on one prefix store", 2 * steps)


def test_lock_that_another_holds_for_too_long_is_told_of(path: Path):
    user = open_folder(path, lock_seconds=0.05)
    keep(user, PROMPT)
    with private_files.locked(path / NODES / "lock", 0):
        with pytest.raises(PrefixStoreFolderError, match=r"locked by another process for 0\.05 s"):
            keep(user, (*PROMPT, 1))
        assert num_found(user, PROMPT) == 200  # a search needs no lock
    assert keep(user, (*PROMPT, 1))


def test_prompt_when_kept_by_two_at_once_then_is_there_once(path: Path):
    names: list[str] = []

    def meanwhile() -> None:
        assert num_found(open_folder(path), PROMPT) == 0
        names.append(add(open_folder(path), PROMPT, 0))
        assert len(files_of(path)) == 2

    assert [add(open_folder(path), PROMPT, 0, meanwhile=meanwhile)] == names
    check_whole(path)
    assert [node.name for node in nodes_of(path)] == names


def test_folder_without_locks_still_finds_what_is_right(path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(private_files.fcntl, "flock", flock)
    user, other, random = open_folder(path, MAX_BYTES), open_folder(path, MAX_BYTES), Random(0)
    for _ in range(100):
        step(random.choice((user, other)), random)
    keep(user, PROMPT)
    with found(user, PROMPT) as match:
        other.remove(match.nodes[0].name)  # nobody can tell that it is in use
    (path / NODES / ("0" * 32 + ".unfinished")).write_text("may be written")
    assert keep(open_folder(path), PROMPT)
    (path / NODES / ("0" * 32 + ".unfinished")).unlink()  # nor that nobody writes
    check_whole(path)
