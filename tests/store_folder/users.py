"""Users of a folder in processes of their own; without torch, so that they begin quickly."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

from hf_hybrid_cache.prefix_folder import (
    NodeInUseError,
    NodeNotFoundError,
    PayloadWriter,
    PrefixFolder,
    PrefixFolderFullError,
)
from hf_hybrid_cache.prefix_folder.folder import Folder

from prefix_folder.stored import IDENTITY, Tokens, check, keep, open_folder, payload_of, random_prompt

TESTS = Path(__file__).parents[1]
MAX_BYTES = 60_000
PROMPT: Tokens = tuple(range(200))


def start(call: str) -> subprocess.Popen[str]:
    """Start a process that calls a function of this module; it is told by a line and tells by lines."""
    program = f"from prefix_folder import users; users.{call}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=pipe, stdout=pipe, text=True)


def common_prompts() -> list[Tokens]:
    """Prompts that all processes use."""
    random, prompts = Random(0), list[Tokens]()
    for _ in range(12):
        prompts.append(random_prompt(random, prompts))
    return prompts


def use_at_random(path: str, seed: int, steps: int) -> None:
    """Use a folder, and tell of each step when it is done."""
    user, random = open_folder(Path(path), MAX_BYTES), Random(seed)
    for number in range(steps):
        step(user, random)
        print(number, flush=True)


def step(user: PrefixFolder, random: Random) -> None:
    """Find a prompt, keep one, or remove one, beside others that do the same."""
    tokens, whole_nodes = random.choice(common_prompts())[: random.randint(1, 500)], random.random() < 0.5
    # A node may be in use, removed by another one, or without room.
    with contextlib.suppress(NodeInUseError, NodeNotFoundError, PrefixFolderFullError):
        if random.random() < 0.4:
            with user.find(IDENTITY, tokens, whole_nodes) as match:
                for _ in range(3):
                    check(match, tokens, whole_nodes=whole_nodes)
        elif random.random() < 0.8:
            keep(user, tokens, whole_nodes=whole_nodes)
        elif entries := user.entries():
            user.remove(random.choice(entries).id)


def hold_lock(path: str) -> None:
    """Stop while the folder is locked."""
    with Folder(Path(path), 30).locked():
        print("locked", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def read_slowly(path: str) -> None:
    """Use a prompt until told to end."""
    with open_folder(Path(path)).find(IDENTITY, PROMPT) as match:
        print(match.num_tokens, flush=True)
        input()
        check(match, PROMPT)


def write_slowly(path: str) -> None:
    """Keep a prompt, but wait in the middle until told to go on; tell the id."""
    payload = payload_of(PROMPT, 0)

    def write(file: PayloadWriter) -> None:
        file.write(payload[:10])
        print("writing", flush=True)
        input()
        file.write(payload[10:])

    print(open_folder(Path(path)).add(IDENTITY, PROMPT, 0, len(payload), write).hex(), flush=True)
