"""Whatever happens to files or the database: what is found is right, and what is not goes with a warning."""

import os
import shutil
import warnings
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_hybrid_cache.files.tensor_file import CacheFileError, NewFile
from hf_hybrid_cache.prefix_store.errors import NodeNotFoundError, PrefixStoreFolderError
from hf_hybrid_cache.prefix_store.keys import as_bytes, end_digests, identity_digest
from hf_hybrid_cache.prefix_store.node_files import Node
from hf_hybrid_cache.prefix_store.private_files import Lock, try_lock

from common.limits import limited
from common.soak import budget, count
from store_folder.stored import (
    BEGINNING,
    FIRST,
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
    section_of,
    states_of,
)

ignores_removals = pytest.mark.filterwarnings("ignore:.*removed")
REMOVED = r"\.safetensors .* It was removed from the store\.$"


def file_of(path: Path, tokens: Tokens) -> Path:
    """Return the file of the last node of a prompt."""
    with open_folder(path).find(IDENTITY, keys_of(tokens)) as match:
        return match.nodes[-1].path


# --- what happens to the file of the beginning of two prompts


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def alter(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def in_its_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(file: Path) -> None:
        file.rename(file.parents[2] / "elsewhere")
        make(file)

    return harm


FILES: dict[str, Callable[[Path], object]] = {
    "altered": lambda file: alter(file, -1),
    "empty": in_its_place(Path.touch),
    "a header larger than memory": lambda file: file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:]),
    "a file larger than memory": lambda file: os.truncate(file, 2**42),
    "of another prompt": lambda file: shutil.copy(file_of(file.parents[1], THIRD), file),
    "of another program": lambda file: save_file({"keys": np.zeros((1, 4), np.uint8)}, file),
}


# --- files whose heads say wrong things of themselves

ROOT, KEYS = identity_digest(IDENTITY), as_bytes(keys_of(THIRD))
HEAD = {"identity": ROOT, "keys": b64encode(KEYS).decode(), "description": "Dear", "states": ""}
END = [*end_digests(ROOT, KEYS)][-1]
METADATA = HEAD | {"format": "hf_hybrid_cache.prefix_store", "format_version": "5", "node": f"{END}-{ROOT}"}
HEADS: list[dict[str, Any]] = [
    {"metadata": METADATA | {"format_version": "2"}},
    *({"metadata": {name: text for name, text in METADATA.items() if name != missing}} for missing in METADATA),
    *(
        {"metadata": METADATA | {"keys": keys}}
        for keys in ("", "no", "A" * 16, *(b64encode(KEYS[:end]).decode() for end in (-4, -1)))
    ),
    {"end": "0" * 32},
    {"start": "0" * 32},
]


def write_node(path: Path, metadata: dict[str, str] = METADATA, end: str = END, start: str = ROOT) -> None:
    """Write a file of the third prompt."""
    node = Node(path / NODES, end, start)
    node.path.unlink(missing_ok=True)
    with node.path.open("xb", buffering=0) as file:
        NewFile(metadata, [section_of(states_of(THIRD, 0))], 64).write(file)


def test_file_of_this_version_is_found_again(path: Path):
    open_folder(path)
    write_node(path)
    user = open_folder(path)
    assert num_found(user, THIRD) == 100
    assert [entry.description for entry in user.entries()] == ["Dear"]
    check_whole(path)


# --- what must be true then


class Harm(NamedTuple):
    """Something that happens to a folder, what is told, and how many tokens of the three prompts are left."""

    act: Callable[[Path], object]
    told: str
    left: list[int] = LENGTHS


def to_file(harm: Callable[[Path], object]) -> Harm:
    return Harm(lambda path: harm(file_of(path, BEGINNING)), REMOVED, [0, 0, 100])


def swap(path: Path) -> None:
    one, other = file_of(path, BEGINNING), file_of(path, THIRD)
    one.rename(path / "between")
    other.rename(one)
    (path / "between").rename(other)


def copy_that_of_another_model(path: Path) -> None:
    user = open_folder(path)
    keep(user, BEGINNING, identity=b"another model")
    with user.find(b"another model", keys_of(FIRST)) as match:
        match.nodes[0].path.rename(file_of(path, BEGINNING))


HARMS = {
    **{f"file: {name}": to_file(act) for name, act in FILES.items()},
    **{
        f"head: {at}": Harm(partial(write_node, **head), REMOVED, [300, 300, 0 if "metadata" in head else 100])
        for at, head in enumerate(HEADS)
    },
    "swapped": Harm(swap, REMOVED, [0, 0, 0]),
    "of another model": Harm(copy_that_of_another_model, REMOVED, [0, 0, 100]),
    "removed by hand": Harm(lambda path: file_of(path, BEGINNING).unlink(), "continues a prompt that is", [0, 0, 100]),
}


@ignores_removals
@pytest.mark.parametrize("harm", HARMS)
def test_folder_when_harmed_then_what_is_left_is_right(harm: str, filled: Path):
    user, (act, told, left) = open_folder(filled), HARMS[harm]
    with pytest.warns(UserWarning, match=told):  # noqa: PT031
        act(filled)
        all_found(user)
        for name in user.damages():
            user.remove_damaged(name)
        assert user.damages() == {}
    for each in (user, open_folder(filled)):
        assert all_found(each) == left
    check_whole(filled)
    assert [keep(user, tokens) for tokens in PROMPTS] == [
        number < most for number, most in zip(left, LENGTHS, strict=True)
    ]
    assert all_found(user) == LENGTHS


def harm_at_random(random: Random, file: Path, others: list[Path]) -> None:
    content = file.read_bytes()
    at, end = sorted(random.randrange(len(content)) for _ in range(2))
    noise = random.randbytes(random.choice((1, 1, 4, end - at)))
    harmed = (content[:at], content[at:], content[:at] + noise + content[at + len(noise) :], content + noise)
    file.write_bytes(random.choice((*harmed, harmed[2], harmed[2], random.choice(others).read_bytes())))


@pytest.mark.soak
def test_folder_when_harmed_at_random_then_finds_nothing_wrong(filled: Path):
    prompts = [*PROMPTS, (*SECOND, *range(200))]
    keep(open_folder(filled), prompts[-1])
    shutil.copytree(filled, good := filled.parent / "good")
    for seed in range(budget(300, 20_000)):
        random = Random(seed)
        shutil.rmtree(filled)
        shutil.copytree(good, filled)
        known, files = open_folder(filled), files_of(filled)
        file = random.choice(files)
        harm_at_random(random, file, [each for each in files if each != file])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for user in random.sample((known, known, None), 3):
                lengths = [num_found(user or open_folder(filled), tokens) for tokens in prompts]
                assert lengths.count(0) < 4
            for name in known.damages():
                known.remove_damaged(name)
            assert known.damages() == {}, seed
            for tokens in prompts:
                keep(known, tokens)
                assert num_found(known, tokens) == len(tokens), seed
        check_whole(filled)
        count("prefix stores harmed")


# --- files that are not removed, or by whom


def test_file_that_cannot_be_opened_now_is_not_removed(filled: Path):
    user, damaged = open_folder(filled), file_of(filled, THIRD)
    files = files_of(filled)
    for number in range(10):
        free = len(os.listdir("/dev/fd")) - 1 + number
        try:
            with limited("RLIMIT_NOFILE", free):
                user.remove_damaged(damaged.stem)
        except PrefixStoreFolderError as error:
            if "cannot be" not in str(error):
                raise
        assert files_of(filled) == files
    assert all_found(open_folder(filled)) == LENGTHS


def test_node_when_its_file_is_locked_for_too_long_then_is_told(filled: Path):
    with file_of(filled, THIRD).open("rb+") as file:
        if try_lock(file.fileno(), True) is not Lock.HELD:
            pytest.skip("needs locks of the system")
        with pytest.raises(PrefixStoreFolderError, match="has a locked file"):
            open_folder(filled, lock_seconds=0).find(IDENTITY, keys_of(THIRD))


def test_node_when_the_one_before_it_goes_meanwhile_then_is_not_added(filled: Path):
    user, before = open_folder(filled), file_of(filled, THIRD)

    def meanwhile() -> None:
        cut(before)
        with pytest.warns(UserWarning, match=REMOVED):
            assert user.remove_damaged(before.stem)

    with pytest.raises(NodeNotFoundError, match="has lost the tokens before the prompt"):
        add(user, (*THIRD, 1), 100, meanwhile=meanwhile)
    assert len(user.entries()) == 2
    check_whole(filled)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_file_of_a_node_is_left_alone(make: Callable[[Path], object], filled: Path):
    file, user = file_of(filled, THIRD), open_folder(filled)
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
        whole, altered = (node.name for node in match.nodes)
        alter(match.nodes[-1].path, -100)
        assert [*user.damages()] == [altered]
        assert "was altered" in user.damages()[altered]
        assert not user.remove_damaged(whole)
        with pytest.warns(UserWarning, match=REMOVED):
            assert user.remove_damaged(altered)
        # Who has it open, keeps the file; who opens it now, hears of it.
        with pytest.raises(CacheFileError, match="cannot be read: No such file"):
            match.nodes[-1].open()
    assert all_found(user) == [300, 200, 100]
