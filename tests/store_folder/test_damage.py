"""Files that were cut, altered, swapped or replaced are not used: what is found is right, or it goes with a warning."""

import json
import os
import shutil
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_hybrid_cache.files.tensor_file import CacheFileError, NewFile, Section, TensorForm
from hf_hybrid_cache.prefix_store.errors import NodeNotFoundError, PrefixStoreFolderError
from hf_hybrid_cache.prefix_store.folder import Folder
from hf_hybrid_cache.prefix_store.keys import as_bytes, prefix_digests
from hf_hybrid_cache.prefix_store.private_files import Lock, try_lock

from common.limits import limited
from common.soak import budget, count
from store_folder.stored import IDENTITY, Tokens, keep, keys_of, num_found, open_folder, section_of, states_of
from store_folder.trials import check_whole

FIRST = tuple(range(300))
SECOND = (*FIRST[:200], *range(1000, 1100))
THIRD = tuple(range(5000, 5100))
PROMPTS: list[Tokens] = [FIRST, SECOND, THIRD]
ignores_removals = pytest.mark.filterwarnings("ignore:.*removed", "ignore:.*made again")


@pytest.fixture
def filled(path: Path) -> Path:
    for tokens in PROMPTS:
        keep(open_folder(path), tokens)
    return path


def all_found(user: Folder) -> list[int]:
    return [num_found(user, tokens) for tokens in PROMPTS]


def file_of(path: Path, tokens: Tokens) -> Path:
    """Return the file of the last node of a prompt."""
    with open_folder(path).find(IDENTITY, keys_of(tokens)) as match:
        return match.parts[-1].path


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def alter(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def in_its_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(file: Path) -> None:
        file.unlink()
        make(file)

    return harm


def make_link(file: Path) -> None:
    elsewhere = file.parents[2] / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


HARMS: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "altered head": lambda file: alter(file, 187),
    "altered states": lambda file: alter(file, -1),
    "empty": in_its_place(Path.touch),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "a header larger than memory": lambda file: file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:]),
    "a file larger than memory": lambda file: os.truncate(file, 2**42),
    "foreign": lambda file: file.write_bytes(b"\x89PNG" + bytes(9000)),
    "of another prompt": lambda file: shutil.copy(file_of(file.parents[1], THIRD), file),
    "of another program": lambda file: save_file({"keys": np.zeros((1, 4), np.uint8)}, file),
}
if sys.platform == "linux":
    HARMS |= {
        "pipe": in_its_place(os.mkfifo),
        "socket": in_its_place(lambda file: os.mknod(file, stat.S_IFSOCK | 0o600)),
        "link": make_link,
    }


@pytest.mark.filterwarnings("ignore:.*made again")
@pytest.mark.parametrize("has_database", [True, False])
@pytest.mark.parametrize("harm", HARMS)
def test_file_when_harmed_then_goes_with_what_continues_it(harm: str, has_database: bool, filled: Path):
    user = open_folder(filled)
    HARMS[harm](file_of(filled, FIRST))
    if not has_database:
        (filled / "prompts.sqlite").unlink()
    with pytest.warns(UserWarning, match=r"\.safetensors .* It was removed from the store\.$"):
        assert num_found(user, FIRST) == 0
    for each in (user, open_folder(filled)):
        assert all_found(each) == [0, 0, 100]
    check_whole(filled)
    assert keep(user, FIRST)


@pytest.mark.parametrize("has_database", [True, False])
@ignores_removals
def test_files_when_swapped_then_neither_is_used_for_the_other(has_database: bool, filled: Path):
    user, one, other = open_folder(filled), file_of(filled, FIRST), file_of(filled, THIRD)
    one.rename(filled / "between")
    other.rename(one)
    (filled / "between").rename(other)
    if has_database:
        assert all_found(user) == [0, 0, 0]
        assert user.entries() == []
    else:
        (filled / "prompts.sqlite").unlink()
        assert all_found(open_folder(filled)) == [300, 200, 100]  # an end has lost its beginning


@ignores_removals
def test_files_of_two_models_when_swapped_then_nothing_wrong_is_found(filled: Path):
    user = open_folder(filled)
    keep(user, FIRST[:250], identity=b"another model")
    with user.find(b"another model", keys_of(FIRST)) as match:
        other = match.parts[0].path
    shutil.copy(other, file_of(filled, FIRST))
    (filled / "prompts.sqlite").unlink()
    late = open_folder(filled)
    assert all_found(late) == [0, 0, 100]
    assert num_found(late, FIRST, b"another model") == 250


def test_file_that_cannot_be_opened_now_is_not_removed(filled: Path):
    (filled / "prompts.sqlite").unlink()
    files = sorted((filled / "nodes").iterdir())
    for number in range(10):
        free = len(os.listdir("/dev/fd")) - 1 + number
        try:
            with limited("RLIMIT_NOFILE", free):
                open_folder(filled)
        except PrefixStoreFolderError as error:
            if "cannot be" not in str(error):
                raise
        assert sorted((filled / "nodes").iterdir()) == files
    assert all_found(open_folder(filled)) == [300, 300, 100]


def test_file_that_was_removed_by_hand_takes_what_continues_it(filled: Path):
    user, files = open_folder(filled), [file_of(filled, tokens) for tokens in (FIRST, THIRD)]
    for file in files:
        file.unlink()
    assert [entry.node.start for entry in user.entries()] == [192]
    user.remove(files[1].stem)
    with pytest.warns(UserWarning, match="lacks files. 1 that continue them were removed"):
        open_folder(filled)
    assert user.entries() == []
    assert keep(user, THIRD)
    check_whole(filled)


def test_node_when_its_file_is_locked_for_too_long_then_is_told(filled: Path):
    with file_of(filled, THIRD).open("rb+") as file:
        if try_lock(file.fileno(), True) is not Lock.HELD:
            pytest.skip("needs locks of the system")
        with pytest.raises(PrefixStoreFolderError, match="has a locked file"):
            open_folder(filled, lock_seconds=0).find(IDENTITY, keys_of(THIRD))


def test_node_when_the_one_before_it_goes_meanwhile_then_is_not_added(filled: Path):
    user, before = open_folder(filled), file_of(filled, THIRD)
    section = section_of(b"states " * 4)

    def data() -> Any:
        cut(before)
        with pytest.warns(UserWarning, match="It was removed from the store"):
            assert user.remove_damaged(before.stem)
        return section.data()

    with pytest.raises(NodeNotFoundError, match="has lost the tokens before the prompt"):
        user.add(IDENTITY, keys_of((*THIRD, 1)), 64, [Section("states", section.forms, data)])
    assert len(user.entries()) == 2
    check_whole(filled)


@ignores_removals
def test_folder_in_the_place_of_a_file_is_left_alone(filled: Path):
    file, user = file_of(filled, THIRD), open_folder(filled)
    file.unlink()
    file.mkdir()
    for each in (user, open_folder(filled)):
        assert all_found(each) == [300, 300, 0]
    assert file.is_dir()


def test_states_when_altered_then_verifying_says_so(filled: Path):
    user, file = open_folder(filled), file_of(filled, SECOND)
    with user.find(IDENTITY, keys_of(SECOND)) as match:
        whole, altered = (part.node.name for part in match.parts)
        alter(file, -100)
        assert [*user.damages()] == [altered]
        assert "was altered" in user.damages()[altered]
        assert not user.remove_damaged(whole)
        with pytest.warns(UserWarning, match="removed from the store"):
            assert user.remove_damaged(altered)
        # Who has it open, keeps the file; who opens it now, hears of it.
        with pytest.raises(CacheFileError, match="cannot be read: No such file"):
            match.parts[-1].open()
    assert all_found(user) == [300, 200, 100]


def harm_at_random(random: Random, file: Path, others: list[Path]) -> None:
    content = file.read_bytes()
    at, end = sorted(random.randrange(len(content)) for _ in range(2))
    noise = random.randbytes(random.choice((1, 1, 4, end - at)))
    harmed = (content[:at], content[at:], content[:at] + noise + content[at + len(noise) :], content + noise)
    file.write_bytes(random.choice((*harmed, harmed[2], harmed[2], random.choice(others).read_bytes())))


@pytest.mark.soak
def test_folder_when_harmed_at_random_then_finds_nothing_wrong(path: Path):
    prompts = [*PROMPTS, (*SECOND, *range(200))]
    for tokens in prompts:
        keep(open_folder(path), tokens)
    shutil.copytree(path, good := path.parent / "good")
    for seed in range(budget(300, 20_000)):
        random = Random(seed)
        shutil.rmtree(path)
        shutil.copytree(good, path)
        known, files = open_folder(path), sorted((path / "nodes").iterdir())
        file = random.choice([*files, path / "prompts.sqlite", path / "prompts.sqlite"])
        harm_at_random(random, file, [each for each in files if each != file])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for user in random.sample((known, known, None), 3):
                    lengths = [num_found(user or open_folder(path), tokens) for tokens in prompts]
                    assert file not in files or lengths.count(0) < 4
                for name in known.damages():
                    known.remove_damaged(name)
            except PrefixStoreFolderError as error:
                # A store of another program, for all that one can see, is not touched.
                if "give another folder" not in str(error):
                    raise
                continue
            assert known.damages() == {}, seed
            for tokens in prompts:
                keep(known, tokens)
                assert num_found(known, tokens) == len(tokens), seed
        check_whole(path)
        count("prefix stores harmed")


# Heads of nodes, which say in their metadata who they are

PREFIX = prefix_digests(IDENTITY, b"")[0]
NODE = {"parent": None, "prefix": PREFIX, "start": 0}
METADATA = {"format": "hf_hybrid_cache.prefix_store", "format_version": "2", "description": "Dear", "states": ""}
FORM = TensorForm("uint8", (100, 4))


def write_node(path: Path, metadata: dict[str, str], node: Any = NODE, form: TensorForm = FORM) -> None:
    text = node if isinstance(node, str) else json.dumps(node)
    data = as_bytes(keys_of(FIRST[:100]))[: form.num_bytes]
    sections = [Section("keys", {"keys": form}, lambda: [[data]]), section_of(states_of(FIRST[:100], 0))]
    with (path / "nodes" / ("0" * 32 + ".safetensors")).open("xb", buffering=0) as file:
        NewFile(metadata | {"node": text}, sections, 64).write(file)


def test_file_of_version_2_is_found_again(path: Path):
    open_folder(path)
    write_node(path, METADATA)
    user = open_folder(path)
    assert num_found(user, FIRST[:100]) == 100
    assert [entry.description for entry in user.entries()] == ["Dear"]
    check_whole(path)


@pytest.mark.parametrize(
    "head",
    [
        {"metadata": METADATA | {"format_version": "3"}},
        {"metadata": METADATA | {"format": "another"}},
        {"metadata": {name: METADATA[name] for name in ("format", "format_version", "states")}},
        *({"node": NODE | {"start": start}} for start in (-64, 1, 64, 2**70, 0.0, None, "0")),
        *({"node": NODE | {"prefix": prefix}} for prefix in ("", "no", PREFIX * 2, 7, None)),
        *({"node": NODE | {"start": 64, "parent": parent}} for parent in ("0" * 32, "", 7, ["a"])),
        *({"node": node} for node in ({}, [], None, "", "{", "[" * 100_000)),
        *({"form": TensorForm(*form)} for form in (("uint8", ()), ("uint8", (400,)), ("uint8", (0, 4)))),
        {"form": TensorForm("int8", (100, 4))},
    ],
)
def test_head_that_is_none_goes_with_its_file(head: dict[str, Any], path: Path):
    open_folder(path)
    write_node(path, **{"metadata": METADATA, **head})
    with pytest.warns(UserWarning, match="It was removed from the store"):
        open_folder(path)
    check_whole(path)
