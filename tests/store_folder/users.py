"""Users of a folder in processes of their own; without torch, so that they begin quickly."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from hf_hybrid_cache.files.tensor_file import Section
from hf_hybrid_cache.prefix_store.errors import NodeInUseError, NodeNotFoundError, PrefixStoreFullError
from hf_hybrid_cache.prefix_store.folder import Folder

from common.programs import TESTS
from store_folder.stored import (
    IDENTITY,
    Tokens,
    check,
    found,
    keep,
    keys_of,
    num_found,
    open_folder,
    random_prompt,
    section_of,
    states_of,
)

MAX_BYTES = 60_000
PROMPT: Tokens = tuple(range(200))


@contextlib.contextmanager
def started(call: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that calls a function of this module; it is told by a line and tells by lines."""
    program = f"from store_folder import users; users.{call}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    pipe = subprocess.PIPE
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def use_at_random(path: str, seed: int, steps: int) -> None:
    """Use a folder, and tell of each step when it is done."""
    user, random = open_folder(Path(path), MAX_BYTES), Random(seed)
    for number in range(steps):
        step(user, random)
        print(number, flush=True)


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


def find_when_told(path: str) -> None:
    """Find a prompt whenever told to."""
    user = open_folder(Path(path))
    warnings.simplefilter("ignore")
    while True:
        print(num_found(user, PROMPT), flush=True)
        input()


def hold_lock(path: str, how: str) -> None:
    """Stop within a transaction."""
    with contextlib.closing(sqlite3.connect(Path(path, "prompts.sqlite"))) as connection:
        connection.execute(f"BEGIN {how}")
        print("locked", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def read_slowly(path: str) -> None:
    """Use a prompt until told to end."""
    with found(open_folder(Path(path)), PROMPT) as match:
        print(match.num_tokens, flush=True)
        input()
        check(match, PROMPT)


def write_slowly(path: str) -> None:
    """Keep a prompt, but wait in the middle until told to go on; tell the name."""
    section = section_of(states_of(PROMPT, 0))

    def data() -> Any:
        print("writing", flush=True)
        input()
        return section.data()

    slow = Section("states", section.forms, data)
    print(open_folder(Path(path)).add(IDENTITY, keys_of(PROMPT), 0, [slow]), flush=True)
