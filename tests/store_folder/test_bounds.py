"""The limits of a store hold before a byte is written, and the right nodes go first."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hf_hybrid_cache.prefix_folder import PayloadWriter, PrefixFolder, PrefixFolderFullError
from hf_hybrid_cache.prefix_folder.folder import Folder

from prefix_folder.stored import BLOCK, IDENTITY, Tokens, bytes_of_nodes, open_folder

NODE_BYTES = 2 * 4096


def fill(folder: PrefixFolder, tokens: Tokens, start: int = 0) -> bytes:
    """Add a node of two pages."""
    return folder.add(IDENTITY, tokens, start, 4096, lambda file: file.write(bytes(4096)))


def one(number: int) -> Tokens:
    return (number,) * 100


def found(folder: PrefixFolder, *prompts: Tokens) -> list[int]:
    """Return how many tokens of each prompt are stored; they are used by this."""
    matches = [folder.find(IDENTITY, tokens) for tokens in prompts]
    for match in matches:
        match.close()
    return [match.num_tokens for match in matches]


def use_at(path: Path, seconds: int, start: int | None = None) -> None:
    """Let nodes of a folder, those that begin there, be used last at this time."""
    for entry in open_folder(path).entries():
        if start is None or entry.start == start:
            os.utime(path / "nodes" / f"{entry.id.hex()}.node", (seconds, seconds))


def test_store_when_full_then_the_one_used_longest_ago_goes(path: Path):
    folder = open_folder(path, 3 * NODE_BYTES)
    for number in range(3):
        fill(folder, one(number))
    assert found(folder, one(0), one(2)) == [100, 100]
    fill(folder, one(3))
    assert found(folder, *map(one, range(4))) == [100, 0, 100, 100]
    assert bytes_of_nodes(path) == 3 * NODE_BYTES


def test_store_when_full_then_what_others_continue_goes_after_them(path: Path):
    folder = open_folder(path, 3 * NODE_BYTES)
    fill(folder, one(0))
    fill(folder, one(0) + one(1), BLOCK)
    use_at(path, 1, start=0)
    fill(folder, one(2))
    fill(folder, one(3))
    # The beginning of the first prompt was used longest ago, and goes after its end.
    assert [(entry.start, entry.num_tokens) for entry in folder.entries()] == [(0, 100)] * 3
    fill(folder, one(4))
    assert found(folder, *map(one, range(5))) == [0, 0, 100, 100, 100]


@pytest.mark.parametrize("seconds", [(1, 2, 4, 3), (9, 2, 4, 3), (3, 2, 4, 1)])
def test_store_when_two_must_go_then_a_node_goes_after_all_its_children(seconds: tuple[int, ...], path: Path):
    folder = open_folder(path, 4 * NODE_BYTES)
    prompts = [one(0), one(0) + one(1), one(0) + one(2), one(3)]
    for tokens, start in zip(prompts, (0, BLOCK, BLOCK, 0), strict=True):
        fill(folder, tokens, start)
    times: dict[Path, int] = {}
    for tokens, second in zip(prompts, seconds, strict=True):
        with folder.find(IDENTITY, tokens) as match:
            file = match.parts[-1].file.path
        times[file] = second
    for file, second in times.items():
        os.utime(file, (second, second))
    assert folder.add(IDENTITY, one(4), 0, NODE_BYTES, lambda file: file.write(bytes(NODE_BYTES)))
    # One child, and the prompt of its own.
    assert found(folder, *prompts) == [100, 100, 200, 0]


def test_store_when_a_node_has_no_children_left_then_goes_in_its_turn(path: Path):
    folder = open_folder(path, 3 * NODE_BYTES)
    prompts = [one(0), one(0) + one(1), one(2)]
    for tokens, start in zip(prompts, (0, BLOCK, 0), strict=True):
        fill(folder, tokens, start)
    use_at(path, 5, start=0)
    use_at(path, 1, start=BLOCK)
    found(folder, one(0))
    assert folder.add(IDENTITY, one(4), 0, NODE_BYTES, lambda file: file.write(bytes(NODE_BYTES)))
    assert found(folder, *prompts) == [100, 100, 0]


def test_prompt_larger_than_the_limit_is_refused_and_nothing_goes(path: Path):
    folder = open_folder(path, 3 * NODE_BYTES)
    fill(folder, one(0))
    written: list[bytes] = []
    with pytest.raises(PrefixFolderFullError, match=r"has no room for 0\.00 GiB more: .* Raise max_bytes"):
        folder.add(IDENTITY, one(1), 0, 3 * NODE_BYTES, lambda file: written.append(b""))
    assert not written
    assert found(folder, one(0)) == [100]


def test_what_is_in_use_stays_and_so_does_what_it_continues(path: Path):
    folder = open_folder(path, 2 * NODE_BYTES)
    fill(folder, one(0))
    fill(folder, one(0) + one(1), BLOCK)
    with open_folder(path).find(IDENTITY, one(0) + one(1)) as match:
        with pytest.raises(PrefixFolderFullError, match=r"0\.00 GiB of that can be removed"):
            fill(folder, one(2))
        match.parts[0].file.verify()
    assert fill(folder, one(2))


def test_node_that_came_into_use_before_it_goes_stays(path: Path):
    folder, user = Folder(path, 1), open_folder(path)
    fill(user, one(0))
    with folder.locked():
        ids = list(folder.tree.nodes)
        with user.find(IDENTITY, one(0)):
            assert not folder.delete(ids)
        assert found(user, one(0)) == [100]
        assert folder.delete(ids)
    assert found(user, one(0)) == [0]


def test_prompts_being_written_count_before_they_are_there(path: Path):
    folder, other = open_folder(path, 2 * NODE_BYTES), open_folder(path, 2 * NODE_BYTES)

    def write(file: PayloadWriter) -> None:
        assert fill(other, one(1))
        with pytest.raises(PrefixFolderFullError):
            other.add(IDENTITY, one(2), 0, NODE_BYTES, lambda file: None)
        file.write(bytes(4096))

    folder.add(IDENTITY, one(0), 0, 4096, write)
    assert bytes_of_nodes(path) == 2 * NODE_BYTES


def test_prompt_when_found_then_all_its_nodes_are_used(path: Path):
    folder = open_folder(path)
    fill(folder, one(0))
    fill(folder, one(0) + one(1), BLOCK)
    use_at(path, 1)
    assert found(folder, one(0) + one(1)) == [200]
    assert all(entry.last_use > 1 for entry in folder.entries())


@pytest.mark.parametrize("max_bytes", [None, 2**62])
def test_disk_keeps_its_free_bytes(max_bytes: int | None, path: Path):
    free = shutil.disk_usage(path.parent).free
    folder = PrefixFolder(path, max_bytes=max_bytes, min_free_bytes=free + 2**40)
    with pytest.raises(PrefixFolderFullError, match="GiB stay free"):
        fill(folder, one(0))
    assert bytes_of_nodes(path) == 0


def test_prompt_larger_than_the_disk_is_refused(path: Path):
    with pytest.raises(PrefixFolderFullError, match="GiB stay free"):
        open_folder(path).add(IDENTITY, one(0), 0, 2**60, lambda file: None)
    assert bytes_of_nodes(path) == 0


@pytest.mark.parametrize("again", [fill, found])
def test_prompt_when_asked_for_or_kept_again_then_is_used(again: Callable[[PrefixFolder, Tokens], object], path: Path):
    folder = open_folder(path, 2 * NODE_BYTES)
    fill(folder, one(0))
    fill(folder, one(1))
    again(folder, one(0))
    fill(folder, one(2))
    assert found(folder, *map(one, range(3))) == [100, 0, 100]
