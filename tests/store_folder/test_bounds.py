"""The limits of a store hold before a byte is written, and the right nodes go first."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache.files.tensor_file import Section
from hf_hybrid_cache.prefix_store.errors import PrefixStoreFullError
from hf_hybrid_cache.prefix_store.folder import Folder

from store_folder.stored import BLOCK, IDENTITY, Tokens, bytes_of_nodes, keys_of, open_folder, section_of

NODE_BYTES = 8644  # of a head, keys, states and a checksum


def fill(folder: Folder, tokens: Tokens, start: int = 0, num_bytes: int = 4096) -> str:
    """Add a node whose file has `NODE_BYTES`, or as many more as its states."""
    num_bytes += 448 - 64 * math.ceil(len(tokens[start:]) / 16)
    return folder.add(IDENTITY, keys_of(tokens), start, [section_of(bytes(num_bytes))])


def one(number: int) -> Tokens:
    return (number,) * 100


def found(folder: Folder, *prompts: Tokens) -> list[int]:
    """Return how many tokens of each prompt are stored; they are used by this."""
    matches = [folder.find(IDENTITY, keys_of(tokens)) for tokens in prompts]
    for match in matches:
        match.close()
    return [match.num_tokens for match in matches]


def use_at(folder: Folder, tokens: Tokens, seconds: int) -> None:
    """Let the last node of a prompt be used last at this time."""
    with folder.find(IDENTITY, keys_of(tokens)) as match:
        os.utime(match.parts[-1].path, (seconds, seconds))


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        ((1, 2, 4, 3), [100, 100, 200, 0]),
        ((9, 2, 4, 3), [100, 100, 200, 0]),
        ((3, 2, 4, 1), [100, 100, 200, 0]),
        ((1, 2, 3, 9), [100, 100, 100, 100]),
        ((5, 1, 9, 3), [100, 100, 200, 0]),
    ],
)
def test_store_when_two_must_go_then_a_node_goes_after_its_children(
    seconds: tuple[int, ...], left: list[int], path: Path
):
    folder = open_folder(path, 4 * NODE_BYTES)
    prompts = [one(0), one(0) + one(1), one(0) + one(2), one(3)]
    for tokens, start in zip(prompts, (0, BLOCK, BLOCK, 0), strict=True):
        fill(folder, tokens, start)
    for tokens, second in reversed([*zip(prompts, seconds, strict=True)]):
        use_at(folder, tokens, second)
    fill(folder, one(4), num_bytes=3 * 4096)
    assert found(folder, *prompts) == left


def test_prompt_larger_than_the_limit_is_refused_and_nothing_goes(path: Path):
    folder = open_folder(path, 3 * NODE_BYTES)
    fill(folder, one(0))
    with pytest.raises(PrefixStoreFullError, match=r"has no room for 0\.00 GiB more: .* Raise max_bytes"):
        fill(folder, one(1), num_bytes=3 * NODE_BYTES)
    assert found(folder, one(0)) == [100]
    assert bytes_of_nodes(path) == NODE_BYTES


def test_prompts_being_written_count_before_they_are_there(path: Path):
    folder, other = open_folder(path, 2 * NODE_BYTES), open_folder(path, 2 * NODE_BYTES)
    section = section_of(bytes(4096))

    def data() -> Any:
        assert fill(other, one(1))
        with pytest.raises(PrefixStoreFullError):
            fill(other, one(2), num_bytes=2 * 4096)
        return section.data()

    folder.add(IDENTITY, keys_of(one(0)), 0, [Section("states", section.forms, data)])
    assert bytes_of_nodes(path) == 2 * NODE_BYTES


@pytest.mark.parametrize("max_bytes", [None, 2**62])
def test_disk_keeps_its_free_bytes(max_bytes: int | None, path: Path):
    free = shutil.disk_usage(path.parent).free
    folder = Folder(path, max_bytes=max_bytes, min_free_bytes=free + 2**40)
    with pytest.raises(PrefixStoreFullError, match="GiB stay free"):
        fill(folder, one(0))
    assert bytes_of_nodes(path) == 0


@pytest.mark.parametrize("again", [fill, found])
def test_prompt_when_found_or_kept_again_then_all_its_nodes_are_used(
    again: Callable[[Folder, Tokens], object], path: Path
):
    folder = open_folder(path, 3 * NODE_BYTES)
    fill(folder, one(0))
    fill(folder, one(0) + one(1), BLOCK)
    fill(folder, one(2))
    for tokens in (one(0) + one(1), one(0)):
        use_at(folder, tokens, 1)
    again(folder, one(0) + one(1))
    assert all(entry.last_use > 1 for entry in folder.entries())
    fill(folder, one(3))
    assert found(folder, one(0) + one(1), one(2), one(3)) == [200, 0, 100]
