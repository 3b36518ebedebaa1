"""Whatever happens to files: what is found is right, and what is not goes with a warning."""

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from files.forged import parts_of, write
from fuzz.altered import altered as altered_json
from hypothesis import given

from hf_hybrid_cache.files.tensor_file import CacheFileError
from hf_hybrid_cache.prefix_store.errors import NodeNotFoundError, PrefixStoreFolderError
from hf_hybrid_cache.prefix_store.private_files import Lock, try_lock

from common.limits import limited
from common.soak import count, search_at_random
from store_folder.stored import (
    BEGINNING,
    IDENTITY,
    LENGTHS,
    NODES,
    PROMPTS,
    SECOND,
    THIRD,
    Tokens,
    add,
    all_found,
    check_whole,
    files_of,
    keep,
    keys_of,
    num_found,
    open_folder,
)

REMOVED = r"\.safetensors .* It was removed from the store\.$"


def paths_of(path: Path, tokens: Tokens, identity: bytes = IDENTITY) -> list[Path]:
    """Return the files of a prompt."""
    with open_folder(path).find(identity, keys_of(tokens)) as match:
        return [node.path for node in match.nodes]


def harm(data: st.DataObject, file: Path, others: list[Path]) -> set[Path]:
    """Let something happen to a file; return those that are others then, or gone."""
    content, other = file.read_bytes(), data.draw(st.sampled_from(others))
    at = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["cut off", "later", "altered", "longer", "copied", "swapped", "gone", "forged"])):
        case "cut off":
            file.write_bytes(content[:at])
        case "later":
            file.write_bytes(content[at:])
        case "altered":
            noise = data.draw(st.binary(min_size=1, max_size=9))
            file.write_bytes(content[:at] + noise + content[at + len(noise) :])
        case "longer":
            os.truncate(file, len(content) + 2 ** data.draw(st.integers(0, 41)))
        case "copied":
            shutil.copy(other, file)
        case "swapped":
            file.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return {file, other}
        case "gone":
            file.unlink()
        case "forged":
            header, tensors = parts_of(file)
            write(file, data.draw(altered_json(header)), tensors)
    return {file}


@pytest.mark.soak
def test_folder_when_harmed_at_random_then_finds_nothing_wrong(filled: Path):
    prompts = [*PROMPTS, (*SECOND, *range(200))]
    keep(open_folder(filled), prompts[-1])
    keep(open_folder(filled), BEGINNING, b"another model")
    shutil.copytree(filled, good := filled.parent / "good")
    ways = [paths_of(filled, tokens) for tokens in prompts]

    @search_at_random(60)
    @given(st.data())
    def search(data: st.DataObject) -> None:
        shutil.rmtree(filled)
        shutil.copytree(good, filled)
        known, files = open_folder(filled), files_of(filled)
        file = data.draw(st.sampled_from(files))
        harmed = harm(data, file, [each for each in files if each != file])
        there = {*files_of(filled)}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for user in data.draw(st.permutations((known, known, None))):
                for tokens in prompts:
                    num_found(user or open_folder(filled), tokens)
            for name in known.damages():
                known.remove_damaged(name)
        assert bool(there - {*files_of(filled)}) == any("removed from the store" in str(each.message) for each in told)
        check_whole(filled)
        for tokens, way in zip(prompts, ways, strict=True):
            assert num_found(known, tokens) == len(tokens) or harmed & {*way}
            keep(known, tokens)
            assert num_found(known, tokens) == len(tokens)
        check_whole(filled)
        count("prefix stores harmed")

    search()


def test_file_that_cannot_be_opened_now_is_not_removed(filled: Path):
    user, (file,) = open_folder(filled), paths_of(filled, THIRD)
    for number in range(10):
        with (
            limited("RLIMIT_NOFILE", len(os.listdir("/dev/fd")) - 1 + number),
            contextlib.suppress(PrefixStoreFolderError),
        ):
            user.remove_damaged(file.stem)
    assert all_found(user) == LENGTHS


def test_node_when_its_file_is_locked_for_too_long_then_is_told(filled: Path):
    with paths_of(filled, THIRD)[0].open("rb+") as file:
        if try_lock(file.fileno(), True) is not Lock.HELD:
            pytest.skip("needs locks of the system")
        with pytest.raises(PrefixStoreFolderError, match="has a locked file"):
            open_folder(filled, lock_seconds=0).find(IDENTITY, keys_of(THIRD))


def test_node_when_the_one_before_it_goes_meanwhile_then_is_not_added(filled: Path):
    user, (before,) = open_folder(filled), paths_of(filled, THIRD)

    def meanwhile() -> None:
        os.truncate(before, 100)
        with pytest.warns(UserWarning, match=REMOVED):
            assert user.remove_damaged(before.stem)

    with pytest.raises(NodeNotFoundError, match="has lost the tokens before the prompt"):
        add(user, (*THIRD, 1), 100, meanwhile=meanwhile)
    assert all_found(user) == [300, 300, 0]
    check_whole(filled)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_file_of_a_node_is_left_alone(make: Callable[[Path], object], filled: Path):
    (file,), user = paths_of(filled, THIRD), open_folder(filled)
    file.rename(filled / NODES / "elsewhere")
    make(file)
    before = file.lstat()
    for each in (user, open_folder(filled)):
        assert all_found(each) == [300, 300, 0]
        assert each.damages() == {}
    assert file.lstat().st_ino == before.st_ino


def test_states_when_altered_then_verifying_says_so(filled: Path):
    user = open_folder(filled)
    with user.find(IDENTITY, keys_of(SECOND)) as match:
        whole, altered = match.nodes
        content = bytearray(altered.path.read_bytes())
        content[-100] ^= 1
        altered.path.write_bytes(content)
        ((name, reason),) = user.damages().items()
        assert (name, "was altered" in reason) == (altered.name, True)
        assert not user.remove_damaged(whole.name)
        with pytest.warns(UserWarning, match=REMOVED):
            assert user.remove_damaged(name)
        # Who has it open, keeps the file; who opens it now, hears of it.
        with pytest.raises(CacheFileError, match="cannot be read: No such file"):
            altered.open()
