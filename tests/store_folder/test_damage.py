"""Files that were cut, altered, swapped or replaced are not used: what is found is right, or it goes with a warning."""

import os
import shutil
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hf_hybrid_cache.prefix_folder import (
    NodeFileError,
    NodeNotFoundError,
    PayloadWriter,
    PrefixFolder,
    PrefixStoreFolderError,
    locks,
    node_folder,
)
from hf_hybrid_cache.prefix_folder.folder import Folder
from hf_hybrid_cache.prefix_folder.node_file import NodeHead, write_node
from hf_hybrid_cache.prefix_folder.tokens import as_bytes, block_digests

from common.soak import budget, count
from prefix_folder.stored import IDENTITY, Tokens, keep, num_found, open_folder, tokens_of

FIRST = tuple(range(300))
SECOND = (*FIRST[:200], *range(1000, 1100))
THIRD = tuple(range(5000, 5100))


@pytest.fixture
def filled(path: Path) -> Path:
    for tokens in (FIRST, SECOND, THIRD):
        keep(open_folder(path), tokens)
    return path


def tokens_found(user: PrefixFolder, tokens: Tokens) -> int:
    """Return how many tokens are found, which are the prompt's."""
    with user.find(IDENTITY, tokens) as match:
        assert all(
            tokens_of(part.file)[: part.num_tokens] == tokens[part.file.head.start : part.end] for part in match.parts
        )
        return match.num_tokens


def file_of(path: Path, tokens: Tokens) -> Path:
    """Return the file of the last node of a prompt."""
    with open_folder(path).find(IDENTITY, tokens) as match:
        return match.parts[-1].file.path


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def make_empty(file: Path) -> None:
    os.truncate(file, 0)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def alter_tokens(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[187] ^= 1
    file.write_bytes(content)


def claim_more_than_memory(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(128)  # the number of tokens
        opened.write((2**62).to_bytes(8, "little"))


def claim_a_file_larger_than_memory(file: Path) -> None:
    """Make a file without content whose sizes fit each other."""
    with file.open("r+b") as opened:
        opened.seek(128)
        opened.write((2**38).to_bytes(8, "little") + bytes(8) + bytes(8))
    os.truncate(file, 184 + 4 * 2**38 + -(184 + 4 * 2**38) % 4096)


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_socket(file: Path) -> None:
    file.unlink()
    os.mknod(file, stat.S_IFSOCK | 0o600)


def make_link(file: Path) -> None:
    elsewhere = file.parents[2] / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def make_foreign(file: Path) -> None:
    file.write_bytes(b"\x89PNG" + bytes(5000))


def put_another_here(file: Path) -> None:
    shutil.copy(file_of(file.parents[1], THIRD), file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe")
@pytest.mark.parametrize(
    "harm",
    [
        cut,
        make_empty,
        lengthen,
        alter_tokens,
        claim_more_than_memory,
        claim_a_file_larger_than_memory,
        make_pipe,
        pytest.param(make_socket, marks=pytest.mark.skipif(sys.platform != "linux", reason="makes a socket by name")),
        make_link,
        make_foreign,
        put_another_here,
    ],
)
def test_file_when_harmed_then_goes_with_what_continues_it(harm: Callable[[Path], None], filled: Path):
    user = open_folder(filled)
    harm(file_of(filled, FIRST))
    with pytest.warns(UserWarning, match=r"\.node .* It was removed from the store\.$"):
        assert num_found(user, FIRST) == 0
    for each in (user, open_folder(filled)):
        assert [num_found(each, tokens) for tokens in (FIRST, SECOND, THIRD)] == [0, 0, 100]
    assert len(list((filled / "nodes").iterdir())) == 1
    assert keep(user, FIRST)


def test_files_when_swapped_then_neither_is_used(filled: Path):
    user, one, other = open_folder(filled), file_of(filled, FIRST), file_of(filled, THIRD)
    one.rename(filled / "between")
    other.rename(one)
    (filled / "between").rename(other)
    with pytest.warns(UserWarning, match="is the file of another node"):
        assert [num_found(user, tokens) for tokens in (FIRST, SECOND, THIRD)] == [0, 0, 0]
    assert user.entries() == []


def test_file_of_another_store_when_put_in_place_then_is_not_used(filled: Path, tmp_path: Path):
    other, user = open_folder(tmp_path / "other"), open_folder(filled)
    assert other.add(IDENTITY, THIRD, 0, 9, lambda file: file.write(bytes(9)))
    file = file_of(filled, THIRD)
    shutil.copy(tmp_path / "other" / "nodes" / file.name, file)
    with pytest.warns(UserWarning, match="does not fit the index. It was removed from the store"):
        assert num_found(user, THIRD) == 0
    assert keep(user, THIRD)


def test_node_when_the_one_before_it_has_other_tokens_then_is_not_used(filled: Path):
    before, tokens = file_of(filled, THIRD), as_bytes([*range(64), *range(9000, 9100)])
    digests = block_digests(IDENTITY, tokens)
    head = NodeHead(b"another node ...", bytes.fromhex(before.stem), digests[1], digests[-1], 64, tokens[256:], b"", 0)
    with (filled / "nodes" / f"{head.id.hex()}.node").open("xb+") as file:
        write_node(file, head, lambda payload: None)
    (filled / "index").unlink()
    assert len(open_folder(filled).entries()) == 4
    assert num_found(open_folder(filled), (*range(64), *range(9000, 9100))) == 64
    assert tokens_found(open_folder(filled), THIRD) == 100


def test_file_that_was_removed_by_hand_is_missing_and_no_more(filled: Path):
    user = open_folder(filled)
    file_of(filled, FIRST).unlink()
    assert [num_found(user, tokens) for tokens in (FIRST, SECOND, THIRD)] == [0, 0, 100]
    with pytest.warns(UserWarning, match="lacks files. 1 that continue them were removed"):
        open_folder(filled)
    assert len(user.entries()) == 1
    assert keep(user, FIRST)
    assert num_found(user, FIRST) == 300


def test_list_when_a_file_was_removed_by_hand_then_lacks_it(filled: Path):
    user = open_folder(filled)
    file_of(filled, THIRD).unlink()
    assert [entry.num_tokens for entry in user.entries() if not entry.start] == [300]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a link")
@pytest.mark.parametrize("harm", [Path.unlink, make_link])
def test_node_when_its_file_is_gone_then_can_be_removed(harm: Callable[[Path], None], filled: Path):
    user, file = open_folder(filled), file_of(filled, THIRD)
    harm(file)
    user.remove(bytes.fromhex(file.stem))
    assert len(user.entries()) == 2


@pytest.mark.filterwarnings("ignore:.*removed from the store")
@pytest.mark.parametrize("harm", [cut, lambda file: open_folder(file.parents[1]).remove(bytes.fromhex(file.stem))])
@pytest.mark.parametrize(("owner", "name"), [(node_folder.NodeFolder, "pin"), (node_folder, "wait_for_lock")])
def test_node_when_harmed_just_before_its_use_then_is_not_found(
    owner: Any, name: str, harm: Callable[[Path], None], filled: Path, monkeypatch: pytest.MonkeyPatch
):
    file, function = file_of(filled, THIRD), getattr(owner, name)

    def harmed_before(*arguments: Any) -> Any:
        monkeypatch.undo()
        harm(file)
        return function(*arguments)

    monkeypatch.setattr(owner, name, harmed_before)
    assert num_found(open_folder(filled), THIRD) == 0


def test_node_when_its_file_is_locked_for_too_long_then_is_told(filled: Path):
    with file_of(filled, THIRD).open("rb+") as file:
        if locks.try_lock(file, True) is not locks.Lock.HELD:
            pytest.skip("needs locks of the system")
        with pytest.raises(PrefixStoreFolderError, match="has a locked file"):
            open_folder(filled, lock_seconds=0).find(IDENTITY, THIRD)


def test_node_when_the_one_before_it_goes_meanwhile_then_is_not_added(filled: Path):
    user, before = open_folder(filled), file_of(filled, THIRD)

    def write(payload: PayloadWriter) -> None:
        cut(before)
        with pytest.warns(UserWarning, match="It was removed from the store"):
            assert user.remove_damaged(bytes.fromhex(before.stem))

    with pytest.raises(NodeNotFoundError, match="has lost the tokens before the prompt"):
        user.add(IDENTITY, (*THIRD, 1), 64, 0, write)
    assert len(list((filled / "nodes").iterdir())) == len(user.entries()) == 2


def test_file_when_harmed_while_the_folder_is_locked_then_stays_unused(filled: Path):
    user = open_folder(filled, lock_seconds=0)
    cut(file_of(filled, THIRD))
    with Folder(filled, 0).locked(), pytest.warns(UserWarning, match="stays: .* has been locked by another process"):
        assert num_found(user, THIRD) == 0
    with pytest.warns(UserWarning, match="It was removed from the store"):
        assert num_found(user, THIRD) == 0


def test_prompt_when_its_file_was_removed_by_hand_then_can_be_kept_again(filled: Path):
    user, file = open_folder(filled), file_of(filled, THIRD)
    file.unlink()
    assert keep(user, THIRD)
    assert num_found(user, THIRD) == 100
    user.remove(bytes.fromhex(file.stem))
    assert num_found(user, THIRD) == 0
    assert len(user.entries()) == 2


def test_folder_in_the_place_of_a_file_is_left_alone(filled: Path):
    file, user = file_of(filled, THIRD), open_folder(filled)
    file.unlink()
    file.mkdir()
    with pytest.warns(UserWarning, match="Is a directory. It was removed from the store"):
        assert num_found(user, THIRD) == 0
    assert num_found(open_folder(filled), THIRD) == 0
    assert file.is_dir()
    assert [num_found(open_folder(filled), tokens) for tokens in (FIRST, SECOND)] == [300, 300]


def test_payload_when_altered_then_verifying_says_so(filled: Path):
    user = open_folder(filled)
    assert user.damages() == {}
    file = file_of(filled, SECOND)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert [reason.partition(" ")[2] for reason in user.damages().values()] == [
        "was altered: its payload does not fit its checksum."
    ]
    with user.find(IDENTITY, SECOND) as match:
        with pytest.raises(NodeFileError, match="its payload does not fit"):
            match.parts[-1].file.verify()
        whole, altered = (part.file.head.id for part in match.parts)
        assert not user.remove_damaged(whole)
        with pytest.warns(UserWarning, match="removed from the store"):
            assert user.remove_damaged(altered)
        # Who has it open, keeps the file; who opens it now, hears of it.
        with pytest.raises(NodeFileError, match="cannot be read: No such file"):
            match.parts[-1].file.open()
    assert [num_found(user, tokens) for tokens in (FIRST, SECOND)] == [300, 200]


@pytest.mark.soak
def test_any_altered_byte_is_found(filled: Path):
    random, user = Random(0), open_folder(filled)
    node = next(entry.id for entry in user.entries() if entry.num_tokens == 100 and not entry.start)
    file = file_of(filled, THIRD)
    good = file.read_bytes()
    for _ in range(budget(500, 20_000)):
        altered = bytearray(good)
        place = random.choice((random.randrange(len(good)), random.randrange(200), random.randrange(4000, len(good))))
        altered[place] ^= random.randrange(1, 256)
        file.write_bytes(altered)
        assert user.damages().keys() == {node}, place
        count("bytes of a store of prompts altered")
    file.write_bytes(good)
    assert user.damages() == {}


@pytest.mark.soak
def test_folder_when_harmed_at_random_then_finds_nothing_wrong(path: Path):
    prompts = [FIRST, SECOND, THIRD, (*SECOND, *range(200))]
    for seed in range(budget(300, 10_000)):
        random = Random(seed)
        for tokens in prompts:
            keep(open_folder(path), tokens)
        user = open_folder(path)
        files = sorted((path / "nodes").iterdir())
        file = random.choice([*files, path / "index"])
        content = file.read_bytes()
        at = random.randrange(len(content))
        if file in files and random.random() < 0.2:
            if random.random() < 0.5:
                file.unlink()
            else:
                file.write_bytes(random.choice(files).read_bytes())
        else:
            file.write_bytes(random.choice((content[:at], content[:at] + b"x" + content[at + 1 :], content[at:])))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for each in (user, open_folder(path)):
                found = [tokens_found(each, tokens) for tokens in prompts]
                assert file == path / "index" or found.count(0) < 4
                if file == path / "index":
                    assert found == [len(tokens) for tokens in prompts]
            for own_id in user.damages():
                user.remove_damaged(own_id)
        assert user.damages() == {}
        count("stores of prompts harmed")
        shutil.rmtree(path)


def test_header_when_read_back_then_is_the_same(filled: Path):
    file = file_of(filled, SECOND)
    with file.open("rb") as opened:
        head = NodeHead.read(file, opened)
    assert file.read_bytes().startswith(head.to_bytes())
    assert file.stat().st_size == head.file_bytes
