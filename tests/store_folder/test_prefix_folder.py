"""A folder keeps prompts, and finds them by their longest common prefix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_hybrid_cache.prefix_folder import (
    NodeFileError,
    NodeInUseError,
    NodeNotFoundError,
    PayloadWriter,
    PrefixStoreFolderError,
    TokenIdsError,
)

from prefix_folder.stored import BLOCK, IDENTITY, bytes_of_nodes, check, keep, num_found, open_folder, payload_of, read

FIRST = tuple(range(1000))


def test_prompt_when_kept_then_is_found_by_another_user(path: Path):
    assert num_found(open_folder(path), FIRST) == 0
    assert keep(open_folder(path), FIRST)
    assert num_found(open_folder(path), (*FIRST, 7, 8)) == 1000
    assert not keep(open_folder(path), FIRST)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 128, 999, 1000])
def test_prompt_when_leaving_another_then_shares_its_whole_blocks(cut: int, path: Path):
    folder = open_folder(path)
    keep(folder, FIRST)
    second = (*FIRST[:cut], *range(5000, 5200))
    assert num_found(folder, second) == cut
    keep(folder, second)
    with folder.find(IDENTITY, second) as match:
        check(match, second)
        shared = cut - cut % BLOCK
        assert [part.num_tokens for part in match.parts] == [each for each in (shared, cut + 200 - shared) if each]
    assert num_found(folder, FIRST) == 1000


def test_turn_when_added_to_a_long_chat_then_no_old_file_changes(path: Path):
    folder = open_folder(path)
    chat = tuple(range(20_000))
    keep(folder, chat)
    before = {file: file.read_bytes() for file in (path / "nodes").iterdir()}
    num_bytes = bytes_of_nodes(path)
    keep(folder, chat + tuple(range(200)))
    assert all(file.read_bytes() == content for file, content in before.items())
    payload = len(payload_of(chat + tuple(range(200)), len(chat) // BLOCK * BLOCK))
    assert bytes_of_nodes(path) - num_bytes <= payload + 4096


def test_common_first_half_of_two_documents_is_there_once(path: Path):
    folder = open_folder(path)
    half = tuple(range(100_000))
    keep(folder, half + half)
    one = bytes_of_nodes(path)
    keep(folder, half + half[::-1])
    assert bytes_of_nodes(path) <= 1.51 * one


def test_nodes_when_overlapping_then_the_longer_way_is_found(path: Path):
    folder = open_folder(path)
    keep(folder, FIRST)
    # Says the last two whole blocks again, and leaves the first prompt in the middle of them.
    second = (*FIRST[:900], *range(5000, 5200))
    keep(folder, second, blocks_again=2)
    for tokens, num_tokens in ((FIRST, 1000), (second, 1100), ((*FIRST[:950], 1), 950), ((*second[:930], 1), 930)):
        assert num_found(folder, tokens) == num_tokens
    with folder.find(IDENTITY, FIRST[:890]) as match:
        assert len(match.parts) == 1  # of two ways the one with fewer files


def test_nodes_with_the_same_tokens_when_found_then_the_first_is_used(path: Path):
    folder = open_folder(path)
    keep(folder, FIRST[:500])
    keep(folder, (*FIRST[:500], 7777, 7778), blocks_again=2)
    with folder.find(IDENTITY, (*FIRST[:500], 1)) as match:
        assert [part.num_tokens for part in match.parts] == [500]


def test_ways_to_one_token_when_found_then_that_of_fewer_files_is_used(path: Path):
    folder = open_folder(path)
    keep(folder, FIRST[:100])
    keep(folder, (*FIRST[:80], *range(5000, 5020)))
    with folder.find(IDENTITY, FIRST[:75]) as match:
        assert [part.num_tokens for part in match.parts] == [75]


def test_same_tokens_of_another_identity_are_not_found(path: Path):
    folder = open_folder(path)
    keep(folder, FIRST, identity=b"one")
    assert num_found(folder, FIRST, b"other") == 0
    assert keep(folder, FIRST, identity=b"other")
    assert num_found(folder, FIRST, b"one") == num_found(folder, FIRST, b"other") == 1000


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda ids: np.array(ids, "uint16")])
def test_token_ids_of_any_integers_are_the_same_prompt(make: Callable[[Any], Any], path: Path):
    folder = open_folder(path)
    keep(folder, FIRST)
    with folder.find(IDENTITY, make(FIRST)) as match:
        assert match.num_tokens == 1000


@pytest.mark.parametrize("wrong", [[[1, 2]], [0.5], ["a"], [-1], [2**32], [2**70], [True], None, "text", [[1], [1, 2]]])
def test_what_is_no_prompt_is_refused(wrong: Any, path: Path):
    with pytest.raises(TokenIdsError, match="must be"):
        open_folder(path).find(IDENTITY, wrong)


def test_node_after_tokens_that_are_not_stored_is_refused(path: Path):
    folder = open_folder(path)
    keep(folder, FIRST[:100])
    with pytest.raises(NodeNotFoundError, match="has 100 tokens of the prompt; new ones cannot begin after 128"):
        folder.add(IDENTITY, FIRST, 128, 1, lambda file: file.write(b"x"))


@pytest.mark.parametrize("written", [b"", b"12", b"1234"])
def test_payload_of_another_size_is_refused_and_leaves_nothing(written: bytes, path: Path):
    folder = open_folder(path)
    with pytest.raises(NodeFileError, match=r"was to have 3 bytes, and \d came"):
        folder.add(IDENTITY, FIRST, 0, 3, lambda file: file.write(written))
    assert folder.entries() == []
    assert bytes_of_nodes(path) == 0


def test_write_of_too_much_when_refused_then_nothing_is_written(path: Path):
    folder = open_folder(path)

    def write(file: PayloadWriter) -> None:
        with pytest.raises(NodeFileError, match="and 4 came"):
            file.write(b"1234")
        file.write(b"123")

    folder.add(IDENTITY, FIRST, 0, 3, write)
    assert folder.damages() == {}


def test_write_that_fails_is_told_and_leaves_nothing(path: Path):
    folder = open_folder(path)

    def write(file: PayloadWriter) -> None:
        file.write(b"1")
        raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        folder.add(IDENTITY, FIRST, 0, 3, write)
    assert folder.entries() == []
    assert bytes_of_nodes(path) == 0


def test_payload_in_pieces_of_any_kind_is_read_back(path: Path):
    folder = open_folder(path)

    def write(file: PayloadWriter) -> None:
        file.write(b"1")
        file.write(bytearray(b"23"))
        file.write(np.arange(400_000, dtype="int32"))
        file.write(torch.arange(10).numpy())

    folder.add(IDENTITY, FIRST, 0, 3 + 1_600_000 + 80, write)
    with folder.find(IDENTITY, FIRST) as match:
        assert (
            read(match.parts[0].file) == b"123" + np.arange(400_000, dtype="int32").tobytes() + np.arange(10).tobytes()
        )
        assert match.parts[0].file.head.payload_start % 4096 == 0
        match.parts[0].file.verify()


def test_node_in_use_is_not_removed_until_it_is_closed(path: Path):
    folder = open_folder(path)
    keep(folder, FIRST)
    keep(folder, (*FIRST, 1))
    root = next(entry.id for entry in folder.entries() if not entry.start)
    with open_folder(path).find(IDENTITY, (*FIRST, 1)), pytest.raises(NodeInUseError):
        folder.remove(root)
    with open_folder(path).find(IDENTITY, FIRST[:10]), pytest.raises(NodeInUseError):
        folder.remove(root)
    assert num_found(folder, (*FIRST, 1)) == 1001
    folder.remove(root)
    assert folder.entries() == []
    assert bytes_of_nodes(path) == 0
    with pytest.raises(NodeNotFoundError):
        folder.remove(root)


def test_list_has_what_was_added_and_the_last_used_first(path: Path):
    folder = open_folder(path)
    for number in range(3):
        folder.add(IDENTITY, [number] * 70, 0, number, lambda file, n=number: file.write(bytes(n)), b"%d" % number)
    folder.find(IDENTITY, [1]).close()
    entries = folder.entries()
    assert [entry.description for entry in entries] == [b"1", b"2", b"0"]
    assert {(entry.parent, entry.start, entry.num_tokens) for entry in entries} == {(None, 0, 70)}
    assert [entry.num_bytes for entry in entries] == [4097, 4098, 4096]


def test_token_ids_of_a_node_are_all_up_to_its_end(path: Path):
    folder = open_folder(path)
    prompts = [FIRST[:500], FIRST, (*FIRST[:470], 2**32 - 1, 7)]
    for tokens in prompts:
        keep(folder, tokens)
    entries = folder.entries()
    assert sorted(map(tuple, (folder.token_ids(entry.id) for entry in entries))) == sorted(prompts)
    parent = entries[0].parent
    assert parent is not None
    folder.remove(parent)
    for entry in entries:
        with pytest.raises(NodeNotFoundError, match=f"has no node {entry.id.hex()}"):
            folder.token_ids(entry.id)


def test_token_ids_when_the_file_before_is_missing_then_are_not_there(path: Path):
    folder = open_folder(path)
    for tokens in (FIRST[:500], FIRST):
        keep(folder, tokens)
    last = next(entry for entry in folder.entries() if entry.start)
    (file,) = (file for file in (path / "nodes").iterdir() if file.stem != last.id.hex())
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(NodeNotFoundError, match="has no node"):
        folder.token_ids(last.id)
    file.write_bytes(content[:-1])
    with pytest.raises(NodeFileError, match=r"has [\d,]+ bytes and needs"):
        folder.token_ids(last.id)


def test_folder_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(PrefixStoreFolderError, match="has other files"):
        open_folder(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["letter.txt"]


def test_folder_of_another_version_is_refused_and_stays(path: Path):
    keep(open_folder(path), FIRST)
    mark = path / "lock"
    mark.write_bytes(mark.read_bytes().replace(b"1", b"2"))
    before = sorted(path.rglob("*"))
    with pytest.raises(PrefixStoreFolderError, match="another version"):
        open_folder(path)
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), lambda path: path.symlink_to("nowhere")])
def test_path_that_is_no_folder_is_refused(make: Callable[[Path], Any], path: Path):
    make(path)
    with pytest.raises(PrefixStoreFolderError, match="cannot be used as a store"):
        open_folder(path)


def test_folder_when_removed_meanwhile_then_says_so(path: Path):
    folder = open_folder(path)
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(PrefixStoreFolderError, match="cannot be"):
        folder.find(IDENTITY, FIRST)


def test_prompt_when_removed_then_what_another_continues_stays(path: Path):
    folder = open_folder(path)
    for end in (200, 500, 1000):
        keep(folder, FIRST[:end])
    keep(folder, (*FIRST[:200], 7))
    ids = {entry.start + entry.num_tokens: entry.id for entry in folder.entries()}
    with folder.find(IDENTITY, FIRST), pytest.raises(NodeInUseError):
        folder.remove_unshared(ids[1000])
    for own_id, except_tokens in ((bytes(16), 0), (ids[1000], 1000), (ids[200], 0)):
        folder.remove_unshared(own_id, except_tokens)
    assert num_found(folder, FIRST) == 1000
    folder.remove_unshared(ids[1000])
    assert num_found(folder, FIRST) == 200
    folder.remove_unshared(ids[201], except_tokens=200)
    assert [entry.id for entry in folder.entries()] == [ids[200]]
