"""A folder keeps prompts and finds them, within limits, and refuses and leaves alone what is not its own."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hf_hybrid_cache.prefix_store.errors import NodeInUseError, PrefixStoreFolderError, PrefixStoreFullError
from hf_hybrid_cache.prefix_store.folder import Folder

from store_folder.stored import (
    FIRST,
    IDENTITY,
    NODES,
    Tokens,
    bytes_of_nodes,
    keep,
    keys_of,
    nodes_of,
    num_found,
    open_folder,
    section_of,
)

NODE_BYTES = 8196  # of a header, states and a checksum


def add(
    folder: Folder,
    tokens: Tokens,
    start: int = 0,
    num_bytes: int = 4096,
    meanwhile: Callable[[], object] = lambda: None,
) -> str:
    """Add a node whose file has `NODE_BYTES`, or as many more as its states."""
    return folder.add(IDENTITY, keys_of(tokens), start, [section_of(bytes(num_bytes), meanwhile)], f"{tokens[start]}")


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
        os.utime(match.nodes[-1].path, (seconds, seconds))


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        ((1, 2, 4, 3), [100, 100, 200, 0]),
        ((3, 2, 4, 1), [100, 100, 200, 0]),
        ((1, 2, 3, 9), [100, 100, 100, 100]),
    ],
)
def test_store_when_two_must_go_then_a_node_goes_after_its_children(
    seconds: tuple[int, ...], left: list[int], path: Path
):
    folder = open_folder(path, 4 * NODE_BYTES)
    prompts = [one(0), one(0) + one(1), one(0) + one(2), one(3)]
    for tokens in prompts:
        add(folder, tokens, len(tokens) - 100)
    for tokens, second in reversed([*zip(prompts, seconds, strict=True)]):
        use_at(folder, tokens, second)
    add(folder, one(4), num_bytes=3 * 4096)
    assert found(folder, *prompts) == left


@pytest.mark.parametrize("again", [add, found])
def test_prompt_when_found_or_kept_again_then_all_its_nodes_are_used(
    again: Callable[[Folder, Tokens], object], path: Path
):
    folder, both = open_folder(path, 3 * NODE_BYTES), one(0) + one(1)
    for tokens, seconds in ((one(0), 1), (both, 1), (one(2), 2)):
        add(folder, tokens, len(tokens) - 100)
        use_at(folder, tokens, seconds)
    again(folder, both)
    assert [way[-1][1].description for way in folder.prompts()] == ["1", "2"]  # what was used last comes first
    add(folder, one(3))
    assert found(folder, both, one(2), one(3)) == [200, 0, 100]


def test_prompts_being_written_count_before_they_are_there(path: Path):
    folder, other = open_folder(path, 2 * NODE_BYTES), open_folder(path, 2 * NODE_BYTES)

    def meanwhile() -> None:
        assert add(other, one(1))
        with pytest.raises(PrefixStoreFullError):
            add(other, one(2), num_bytes=2 * 4096)

    add(folder, one(0), meanwhile=meanwhile)
    assert bytes_of_nodes(path) == 2 * NODE_BYTES


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ((3 * NODE_BYTES, 0), r"has no room for [\d.]+ [KM]iB more: it has [\d.]+ [KM]iB of .* Raise max_bytes"),
        ((None, 2**60), r"GiB stay free\. Free some, or close what is in use"),
        ((2**62, 2**60), "GiB stay free"),
    ],
)
def test_prompt_without_room_is_refused_and_nothing_goes(limits: tuple[int | None, int], reason: str, path: Path):
    add(open_folder(path), one(0))
    folder = Folder(path, max_bytes=limits[0], min_free_bytes=limits[1])
    with pytest.raises(PrefixStoreFullError, match=reason):
        add(folder, one(1), num_bytes=3 * NODE_BYTES)
    assert found(folder, one(0)) == [100]
    assert bytes_of_nodes(path) == NODE_BYTES


def test_prompt_when_removed_then_nodes_that_are_named_or_used_stay(path: Path):
    folder, tokens = open_folder(path), tuple(range(1000))
    for prompt in (tokens[:200], tokens):
        keep(folder, prompt)
    before, last = (node.name for node in sorted(nodes_of(path), key=lambda node: len(folder.keys(node.name))))
    with folder.find(IDENTITY, keys_of(tokens)), pytest.raises(NodeInUseError):
        folder.remove_unshared(last)
    folder.remove_unshared(last, [last.partition("-")[0]])
    assert num_found(folder, tokens) == 1000
    folder.remove_unshared(last, [before.partition("-")[0]])
    assert [way[-1][0].name for way in folder.prompts()] == [before]


def test_store_stays_when_the_working_directory_changes_and_may_go(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parent)
    user = open_folder(Path(path.name))
    monkeypatch.chdir("/")
    assert keep(user, FIRST)
    assert num_found(open_folder(path), FIRST) == 300
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(PrefixStoreFolderError, match="cannot be read"):
        num_found(user, FIRST)
    assert not path.exists()


# Files of others, of processes that have ended, links and owners

NAME = f"{'0' * 32}-{'0' * 32}"
NOT_OURS = ["letter.txt", NAME, f"{NAME[1:]}.safetensors", f"{NAME[:-1]}Z.safetensors", f"{NAME}.safetensors.old"]
NOT_OURS += ["0" * 31 + ".unfinished", "0" * 32 + ".unfinished.txt", "A" * 32 + ".unfinished", "." + "0" * 31]


def contents(path: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}


def test_files_of_others_when_in_a_store_then_stay(path: Path):
    open_folder(path)
    nodes = path / NODES
    for name in NOT_OURS:
        (nodes / name).write_text("Dear")
    (nodes / f"{NAME}.safetensors").mkdir()
    before = contents(nodes)
    (nodes / ("0" * 32 + ".unfinished")).write_text("left by a process that has ended")
    assert keep(open_folder(path), FIRST)
    assert open_folder(path).damages() == {}
    after = contents(nodes)
    assert before.items() <= after.items()
    assert after.keys() - before.keys() == {nodes / "lock", *(node.path for node in nodes_of(path))}


def moved(path: Path, name: str) -> Path:
    """Give the folder of the nodes another name; return its path from before."""
    (path / NODES).rename(path / name)
    return path / NODES


def of_another_user(path: Path) -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path / NODES, 12345, 12345)


def folder_of_letters(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir(0o755)
    (path / "letter.txt").write_text("Dear")


IS_OTHER = f"has {NODES}, which is a link, something else, or of another user"
# What happens to a store, and what is told then.
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: moved(path, "elsewhere").symlink_to("elsewhere"), IS_OTHER),
    (lambda path: moved(path, "elsewhere").write_text(""), IS_OTHER),
    (of_another_user, IS_OTHER),
    (lambda path: path.rename(path.with_name("elsewhere")) and path.write_text(""), "cannot be used as a store"),
    (lambda path: path.rename(path.with_name("elsewhere")) and path.symlink_to("nowhere"), "cannot be used as a store"),
    (folder_of_letters, r"is no store and has other files \(letter.txt\)"),
    (partial(moved, name="nodes-99"), r"is a store of another version \(nodes-99\), .*: give another folder"),
]


@pytest.mark.skipif(os.name == "nt", reason="makes links")
@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_folder_that_is_not_ours_is_refused_and_stays(change: Callable[[Path], object], reason: str, path: Path):
    keep(open_folder(path), FIRST)
    change(path)
    before = contents(path.parent), path.lstat().st_mode
    with pytest.raises(PrefixStoreFolderError, match=reason):
        open_folder(path)
    assert (contents(path.parent), path.lstat().st_mode) == before


def test_folder_that_is_empty_becomes_private(path: Path):
    path.mkdir(0o755)
    assert keep(open_folder(path), FIRST)
    assert path.stat().st_mode & 0o777 == 0o700
