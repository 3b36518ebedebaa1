"""A folder keeps prompts and finds them, within limits, and leaves alone what others have there."""

import itertools
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache.prefix_store.errors import NodeInUseError, PrefixStoreFolderError, PrefixStoreFullError
from hf_hybrid_cache.prefix_store.folder import Folder

from store_folder.stored import (
    BLOCK,
    IDENTITY,
    Tokens,
    add,
    bytes_of_nodes,
    keep,
    keys_of,
    num_found,
    open_folder,
    section_of,
)

PROMPT = tuple(range(5000))


def test_write_that_fails_is_told_and_leaves_nothing(path: Path):
    folder = open_folder(path)
    with pytest.raises(KeyError, match="of the caller"):
        add(folder, PROMPT, 0, meanwhile=lambda: {}["of the caller"])
    assert folder.entries() == []
    assert bytes_of_nodes(path) == 0


def test_list_has_what_was_added_and_the_last_used_first(path: Path):
    folder = open_folder(path)
    for number in range(3):
        folder.add(IDENTITY, keys_of((number,) * 70), 0, [section_of(bytes(number))], f"{number}")
    folder.find(IDENTITY, keys_of((1,))).close()
    entries = folder.entries()
    assert [entry.description for entry in entries] == ["1", "2", "0"]
    assert {(entry.node.parent, entry.node.start, entry.node.end) for entry in entries} == {(None, 0, 70)}


def test_prompt_when_removed_then_what_another_continues_stays(path: Path):
    folder = open_folder(path)
    for tokens in (PROMPT[:200], PROMPT[:500], PROMPT[:1000], (*PROMPT[:200], 7)):
        keep(folder, tokens)
    names = {entry.node.end: entry.node.name for entry in folder.entries()}
    with folder.find(IDENTITY, keys_of(PROMPT)), pytest.raises(NodeInUseError):
        folder.remove_unshared(names[1000])
    with folder.find(IDENTITY, keys_of((*PROMPT[:200], 7))), pytest.raises(NodeInUseError):
        folder.remove(names[200])
    assert len(folder.entries()) == 4
    for name, except_tokens in (("0" * 32, 0), (names[1000], 1000), (names[200], 0)):
        folder.remove_unshared(name, except_tokens)
    assert num_found(folder, PROMPT) == 1000
    folder.remove_unshared(names[1000])
    assert num_found(folder, PROMPT) == 200
    folder.remove_unshared(names[201], except_tokens=200)
    assert [entry.node.name for entry in folder.entries()] == [names[200]]


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), lambda path: path.symlink_to("nowhere")])
def test_path_that_is_no_folder_is_refused(make: Callable[[Path], Any], path: Path):
    make(path)
    with pytest.raises(PrefixStoreFolderError, match="cannot be used as a store"):
        open_folder(path)


def test_folder_when_moved_away_then_says_so(path: Path):
    folder = open_folder(path)
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(PrefixStoreFolderError, match="cannot be read"):
        folder.find(IDENTITY, keys_of(PROMPT))
    assert not path.exists()


def test_working_directory_when_changed_then_the_store_stays(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parent)
    user = open_folder(Path(path.name))
    monkeypatch.chdir("/")
    assert keep(user, PROMPT)
    assert num_found(open_folder(path), PROMPT) == 5000


# Limits hold before a byte is written, and the right nodes go first

NODE_BYTES = 8644  # of a head, keys, states and a checksum


def fill(
    folder: Folder,
    tokens: Tokens,
    start: int = 0,
    num_bytes: int = 4096,
    meanwhile: Callable[[], object] = lambda: None,
) -> str:
    """Add a node whose file has `NODE_BYTES`, or as many more as its states."""
    num_bytes += 448 - 64 * math.ceil(len(tokens[start:]) / 16)
    return folder.add(IDENTITY, keys_of(tokens), start, [section_of(bytes(num_bytes), meanwhile)])


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

    def meanwhile() -> None:
        assert fill(other, one(1))
        with pytest.raises(PrefixStoreFullError):
            fill(other, one(2), num_bytes=2 * 4096)

    fill(folder, one(0), meanwhile=meanwhile)
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


# Files of others, of processes that have ended, links and owners

NAME = "0" * 32
NOT_OURS = {
    "nodes": ["letter.txt", NAME, "0" * 31 + ".safetensors", "Z" * 32 + ".safetensors", f"{NAME}.safetensors.old"],
    "unfinished": ["letter.txt", "0" * 31, f"{NAME}.txt", "A" * 32, "." + "0" * 31],
}


def contents(path: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}


def test_files_of_others_when_in_a_store_then_stay(path: Path):
    open_folder(path)
    for folder, names in NOT_OURS.items():
        for name in names:
            (path / folder / name).write_text("Dear")
    (path / "nodes" / f"{NAME}.safetensors").mkdir()
    before = contents(path / "nodes") | contents(path / "unfinished")
    (path / "unfinished" / NAME).write_text("left by a process that has ended")
    assert keep(open_folder(path), PROMPT[:3])
    (path / "prompts.sqlite").unlink()
    assert num_found(open_folder(path), PROMPT[:3]) == 3
    after = contents(path / "nodes") | contents(path / "unfinished")
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1


def test_folder_with_other_files_is_refused_and_stays(path: Path):
    path.mkdir(0o755)
    (path / "letter.txt").write_text("Dear")
    with pytest.raises(PrefixStoreFolderError, match=r"is no store and has other files \(letter.txt\)"):
        open_folder(path)
    assert [each.name for each in path.iterdir()] == ["letter.txt"]
    assert path.stat().st_mode & 0o777 == 0o755
    (path / "letter.txt").unlink()
    assert keep(open_folder(path), PROMPT[:3])
    assert path.stat().st_mode & 0o777 == 0o700


def link(path: Path) -> None:
    elsewhere = path.parents[1] / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_text("Dear")
    path.symlink_to(elsewhere)


def something_else(path: Path) -> None:
    is_folder = path.is_dir()
    path.rename(path.with_name("elsewhere"))
    path.write_text("Dear") if is_folder else path.mkdir()


def of_another_user(path: Path) -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 12345, 12345)


@pytest.mark.skipif(os.name == "nt", reason="makes links")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *itertools.product(["unfinished", "nodes", "prompts.sqlite"], [link, something_else, of_another_user]),
        ("prompts.sqlite-journal", link),
    ],
)
def test_part_of_a_store_when_not_ours_then_refused_and_unchanged(
    name: str, change: Callable[[Path], None], path: Path
):
    keep(open_folder(path), PROMPT[:3])
    change(path / name)
    before = contents(path.parent)
    reason = f"has {name}, which is a link, something else, or of another user|unable to open database file"
    with pytest.raises(PrefixStoreFolderError, match=reason):
        open_folder(path)
    assert contents(path.parent) == before
