"""
Prompts with states that tell what they belong to; without torch, so that processes of their own begin quickly.

    keep(folder, tokens)              # adds what is not stored of a prompt yet
    with found(folder, tokens): ...   # finds it, and compares all states with what they must be
    check_whole(path)                 # nothing is damaged or left over
"""

import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from hf_hybrid_cache.files.tensor_file import CacheFileError, Section, TensorForm
from hf_hybrid_cache.prefix_store.folder import Folder, Match
from hf_hybrid_cache.prefix_store.keys import PASS_ENDS, token_ids_of
from hf_hybrid_cache.prefix_store.node_files import VERSION, Node, Nodes

IDENTITY = b"a model"
NODES = f"nodes-{VERSION}"
# Thousands of files are synced.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
Tokens = tuple[int, ...]
FIRST: Tokens = tuple(range(300))
BEGINNING = FIRST[:200]
SECOND: Tokens = (*BEGINNING, *range(1000, 1100))
THIRD: Tokens = tuple(range(5000, 5100))
PROMPTS = [FIRST, SECOND, THIRD]
LENGTHS = [300, 300, 100]


def fill(path: Path) -> None:
    """Keep the three prompts, of which two continue one node."""
    for tokens in (BEGINNING, *PROMPTS):
        keep(open_folder(path), tokens)


def open_folder(path: Path, max_bytes: int | None = None, lock_seconds: float = 30.0) -> Folder:
    return Folder(path, max_bytes=max_bytes, min_free_bytes=0, lock_seconds=lock_seconds)


def keys_of(tokens: Tokens) -> np.ndarray:
    """Return the keys of tokens after each of which a node may end."""
    return np.array(tokens, np.uint32) | PASS_ENDS


def states_of(tokens: Tokens, start: int, identity: bytes = IDENTITY) -> bytes:
    """Return what is written for the tokens from `start` on: it depends on all of them, and so does its size."""
    digest = blake2b(repr((identity, tokens, start)).encode()).digest()
    return digest * ((len(tokens) - start) // 8) + digest[: len(tokens) % 64]


def section_of(states: bytes, meanwhile: Callable[[], object] = lambda: None) -> Section:
    """Return what a file has of states, and do something while it is written."""

    def pieces() -> Iterator[bytes]:
        yield states[:10]
        meanwhile()
        yield states[10:]

    return Section("states", {"states": TensorForm("uint8", (len(states),))}, lambda: [pieces()])


def keep(folder: Folder, tokens: Tokens, identity: bytes = IDENTITY) -> bool:
    """Add what is not stored of a prompt yet; return whether there was any."""
    with found(folder, tokens, identity) as match:
        if match.num_tokens == len(tokens):
            return False
        add(folder, tokens, match.num_tokens, identity)
        return True


def add(
    folder: Folder,
    tokens: Tokens,
    start: int,
    identity: bytes = IDENTITY,
    meanwhile: Callable[[], object] = lambda: None,
) -> str:
    """Add a node with states that belong to its tokens; return its name."""
    section = section_of(states_of(tokens, start, identity), meanwhile)
    return folder.add(identity, keys_of(tokens), start, [section], repr(start), "")


def found(folder: Folder, tokens: Tokens, identity: bytes = IDENTITY) -> Match:
    """Find a prompt, and check all states; damaged nodes are removed, as a user of a folder does."""
    for _ in range(5):
        match = folder.find(identity, keys_of(tokens))
        try:
            check(match, tokens, identity)
            return match
        except CacheFileError:
            match.close()
            for node in match.nodes:
                folder.remove_damaged(node.name)
    raise AssertionError("A damaged node stays.")


def check(match: Match, tokens_of_prompt: Tokens, identity: bytes = IDENTITY) -> None:
    """Check that parts have the prompt's first tokens, without holes, and the states of these."""
    whole: Tokens = ()
    for node in match.nodes:
        start, (tokens, states) = len(whole), read(node)
        whole += tokens
        assert states == states_of(whole, start, identity)
    assert whole == tokens_of_prompt[: match.num_tokens]


def tokens_of(keys: np.ndarray) -> Tokens:
    return tuple(token_ids_of(keys).tolist())


def read(node: Node) -> tuple[Tokens, bytes]:
    """Return the tokens of a node, and its states."""
    file, head = node.open()
    with file:
        data = bytearray(file.tensors("states")["states"].form.num_bytes)
        file.read("states", {"states": memoryview(data)})
        return tokens_of(head.keys), bytes(data)


def nodes_of(path: Path) -> Nodes:
    return Nodes(path / NODES)


def num_found(folder: Folder, tokens: Tokens, *options: Any, **named: Any) -> int:
    with found(folder, tokens, *options, **named) as match:
        return match.num_tokens


def all_found(folder: Folder) -> list[int]:
    """Return how many tokens are found of each of the three prompts, with all states."""
    return [num_found(folder, tokens) for tokens in PROMPTS]


def bytes_of_nodes(path: Path) -> int:
    return sum(each.stat().st_size for each in files_of(path))


def files_of(path: Path) -> list[Path]:
    """Return the files of nodes, and those that are being written."""
    return sorted(each for each in (path / NODES).iterdir() if each.name != "lock")


def check_whole(path: Path) -> None:
    """Check that no file is damaged or left over."""
    assert open_folder(path, lock_seconds=0).damages() == {}
    assert {node.path for node in nodes_of(path)} == {*files_of(path)}
