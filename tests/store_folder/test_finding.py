"""A folder keeps prompts, and finds them by their longest common prefix; histories at random search for the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache.files.tensor_file import Section
from hf_hybrid_cache.prefix_store.errors import NodeInUseError, PrefixStoreFolderError
from hf_hybrid_cache.prefix_store.folder import Folder

from store_folder.stored import (
    BLOCK,
    IDENTITY,
    Tokens,
    bytes_of_nodes,
    found,
    keep,
    keys_of,
    num_found,
    open_folder,
    section_of,
    states_of,
)

PROMPT = tuple(range(5000))


def runs(folder: Folder, tokens: Tokens) -> list[tuple[int, int, int]]:
    """Return of each part where its node begins, where that ends, and where the part ends."""
    with found(folder, tokens) as match:
        return [(part.node.start, part.node.end, part.end) for part in match.parts]


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 128, 999, 1000])
def test_prompt_when_leaving_another_then_shares_its_whole_blocks(cut: int, path: Path):
    folder, second = open_folder(path), (*PROMPT[:cut], *range(6000, 6200))
    keep(folder, PROMPT[:1000])
    assert num_found(open_folder(path), second) == cut
    assert keep(folder, second)
    shared, end = cut // BLOCK * BLOCK, cut + 200
    assert runs(folder, second) == [(0, 1000, shared)] * (shared > 0) + [(shared, end, end)]
    assert num_found(folder, PROMPT) == 1000
    assert not keep(folder, second[: cut + 1])


def test_turn_when_added_to_a_long_chat_then_no_old_file_changes(path: Path):
    folder, chat = open_folder(path), tuple(range(20_000))
    keep(folder, chat)
    before = {file: file.read_bytes() for file in (path / "nodes").iterdir()}
    num_bytes = bytes_of_nodes(path)
    keep(folder, chat + PROMPT[:200])
    assert all(file.read_bytes() == content for file, content in before.items())
    assert bytes_of_nodes(path) - num_bytes <= len(states_of(chat + PROMPT[:200], 19_968)) + 4096 + 1200


def test_write_that_fails_is_told_and_leaves_nothing(path: Path):
    folder = open_folder(path)

    def data() -> Any:
        yield [b"1"]
        raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        folder.add(IDENTITY, keys_of(PROMPT), 0, [Section("states", section_of(b"1").forms, data)])
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
