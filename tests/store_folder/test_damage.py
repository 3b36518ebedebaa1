"""Whatever happens to files or the database: what is found is right, and what is not goes with a warning."""

import json
import os
import re
import shutil
import sqlite3
import stat
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_hybrid_cache.files.tensor_file import CacheFileError, NewFile, Section, TensorForm
from hf_hybrid_cache.prefix_store.errors import NodeNotFoundError, PrefixStoreFolderError
from hf_hybrid_cache.prefix_store.folder import Folder
from hf_hybrid_cache.prefix_store.keys import as_bytes, identity_digest
from hf_hybrid_cache.prefix_store.private_files import Lock, try_lock

from common.limits import limited
from common.soak import budget, count
from store_folder.stored import (
    BEGINNING,
    FIRST,
    IDENTITY,
    LENGTHS,
    PROMPTS,
    SECOND,
    THIRD,
    Tokens,
    add,
    all_found,
    check_whole,
    execute,
    keep,
    keys_of,
    num_found,
    open_folder,
    section_of,
    states_of,
)

ignores_removals = pytest.mark.filterwarnings("ignore:.*removed", "ignore:.*made again")
REMOVED, MADE_AGAIN = r"\.safetensors .* It was removed from the store\.$", "It is made again from the files"


def file_of(path: Path, tokens: Tokens) -> Path:
    """Return the file of the last node of a prompt."""
    with open_folder(path).find(IDENTITY, keys_of(tokens)) as match:
        return match.parts[-1].path


def database_of(path: Path) -> Path:
    return path / "prompts.sqlite"


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
if sys.platform == "linux":
    FILES |= {
        "pipe": in_its_place(os.mkfifo),
        "socket": in_its_place(lambda file: os.mknod(file, stat.S_IFSOCK | 0o600)),
        "link": in_its_place(lambda file: file.symlink_to(file.parents[2] / "elsewhere")),
    }


# --- what happens to the database


def empty_beside_a_hot_journal(database: Path) -> None:
    with closing(connection_that_changes(database)):
        shutil.copy(f"{database}-journal", database.parent / "hot")
    database.write_bytes(b"")
    (database.parent / "hot").rename(f"{database}-journal")


def be_torn(database: Path) -> None:
    """Become a copy in the middle of a change, without the journal."""
    with closing(connection_that_changes(database)):
        content = database.read_bytes()
    database.write_bytes(content)


def connection_that_changes(database: Path) -> sqlite3.Connection:
    """Change all rows, and write some of that before the end."""
    connection = sqlite3.connect(database, isolation_level=None)
    for statement in (
        "PRAGMA cache_size = 1",
        "PRAGMA cache_spill = 1",
        "BEGIN",
        "UPDATE node SET keys = zeroblob(4000), prefix = randomblob(16)",
        "UPDATE node SET start = 9, description = hex(randomblob(9000))",
    ):
        connection.execute(statement)
    assert Path(f"{database}-journal").stat().st_size > 4096
    return connection


def alter_keys(database: Path, place: int) -> None:
    """Alter the keys of a prompt where they are in the table, or in the index."""
    keys, content = as_bytes(keys_of(THIRD)), database.read_bytes()
    places = [match.start() for match in re.finditer(re.escape(keys[-40:]), content)]
    assert len(places) == 2
    alter(database, places[place])


DATABASES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda database: database.write_bytes(b""),
    "foreign": lambda database: database.write_bytes(b"\x89PNG" + bytes(9000)),
    "other tables": lambda database: execute(database, "ALTER TABLE node ADD COLUMN more"),
    "no index": lambda database: execute(database, "DROP INDEX node_prefix"),
    "no node": lambda database: execute(database, "INSERT INTO node VALUES (9, '../letter', 1, '', '', 0, x'', 0, '')"),
    "an altered row": lambda database: alter_keys(database, 0),
    "an altered index": lambda database: alter_keys(database, 1),
    "a hot journal": empty_beside_a_hot_journal,
    "torn": be_torn,
}


# --- files whose heads say wrong things of themselves

PREFIX = identity_digest(IDENTITY)
NODE = {"parent": None, "prefix": PREFIX, "start": 0}
METADATA = {"format": "hf_hybrid_cache.prefix_store", "format_version": "4", "description": "Dear", "states": ""}
FORM = TensorForm("uint8", (100, 4))
HEADS: list[dict[str, Any]] = [
    {"metadata": METADATA | {"format_version": "2"}},
    {"metadata": {name: METADATA[name] for name in ("format", "format_version", "states")}},
    *({"node": NODE | {"start": start}} for start in (1, 2**70, "0")),
    *({"node": NODE | {"prefix": prefix}} for prefix in ("no", 7)),
    *({"node": NODE | {"start": 64, "parent": parent}} for parent in ("0" * 32, ["a"])),
    *({"node": node} for node in ({}, "{", "[" * 100_000)),
    *({"form": form} for form in (TensorForm("uint8", ()), TensorForm("int8", (100, 4)))),
]


def write_node(path: Path, metadata: dict[str, str] = METADATA, node: Any = NODE, form: TensorForm = FORM) -> None:
    """Write a file, and let the database be made again."""
    text = node if isinstance(node, str) else json.dumps(node)
    data = as_bytes(keys_of(THIRD))[: form.num_bytes]
    sections = [Section("keys", {"keys": form}, lambda: [[data]]), section_of(states_of(THIRD, 0))]
    with (path / "nodes" / ("0" * 32 + ".safetensors")).open("xb", buffering=0) as file:
        NewFile(metadata | {"node": text}, sections, 64).write(file)
    database_of(path).unlink()


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


def without_database(harm: Callable[[Path], object], path: Path) -> None:
    harm(path)
    database_of(path).unlink()


def to_database(harm: Callable[[Path], object], path: Path) -> None:
    harm(database_of(path))


def swap(path: Path) -> None:
    one, other = file_of(path, BEGINNING), file_of(path, THIRD)
    one.rename(path / "between")
    other.rename(one)
    (path / "between").rename(other)


def copy_that_of_another_model(path: Path) -> None:
    user = open_folder(path)
    keep(user, FIRST[:250], identity=b"another model")
    with user.find(b"another model", keys_of(FIRST)) as match:
        shutil.copy(match.parts[0].path, file_of(path, BEGINNING))
    database_of(path).unlink()


HARMS = {
    **{f"file: {name}": to_file(act) for name, act in FILES.items()},
    "file and no database": Harm(partial(without_database, to_file(FILES["altered"]).act), REMOVED, [0, 0, 100]),
    **{f"database: {name}": Harm(partial(to_database, act), MADE_AGAIN) for name, act in DATABASES.items()},
    **{f"head: {at}": Harm(partial(write_node, **head), REMOVED) for at, head in enumerate(HEADS)},
    "swapped": Harm(swap, REMOVED, [0, 0, 0]),
    # Ends have lost their beginning.
    "swapped and no database": Harm(partial(without_database, swap), MADE_AGAIN, [200, 200, 100]),
    "of another model": Harm(copy_that_of_another_model, MADE_AGAIN, [0, 0, 100]),
    "removed by hand": Harm(
        lambda path: [file_of(path, BEGINNING).unlink(), open_folder(path)],
        "lacks files. 2 that continue them were removed",
        [0, 0, 100],
    ),
}


def listed(user: Folder) -> dict[str, str]:
    return {entry.node.name: entry.description for entry in user.entries()}


@ignores_removals
@pytest.mark.parametrize("harm", HARMS)
def test_folder_when_harmed_then_what_is_left_is_right(harm: str, filled: Path):
    user, (act, told, left) = open_folder(filled), HARMS[harm]
    before = listed(user)
    with pytest.warns(UserWarning, match=told):  # noqa: PT031
        act(filled)
        all_found(user)
        assert user.damages() == {}
    for each in (user, open_folder(filled)):
        assert all_found(each) == left
        here = {file.stem for file in (filled / "nodes").iterdir()}
        assert {name: text for name, text in before.items() if name in here}.items() <= listed(each).items()
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
    for seed in range(budget(60)):
        random = Random(seed)
        shutil.rmtree(filled)
        shutil.copytree(good, filled)
        known, files = open_folder(filled), sorted((filled / "nodes").iterdir())
        file = random.choice([*files, database_of(filled), database_of(filled)])
        harm_at_random(random, file, [each for each in files if each != file])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for user in random.sample((known, known, None), 3):
                    lengths = [num_found(user or open_folder(filled), tokens) for tokens in prompts]
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
        check_whole(filled)
        count("prefix stores harmed")


# --- files that are not removed, or by whom


def test_file_that_cannot_be_opened_now_is_not_removed(filled: Path):
    database_of(filled).unlink()
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
    assert all_found(open_folder(filled)) == LENGTHS


def test_node_whose_file_is_gone_is_not_listed_and_can_be_removed(filled: Path):
    user, file = open_folder(filled), file_of(filled, THIRD)
    file.unlink()
    assert {entry.node.start for entry in user.entries()} == {0, 200}
    assert file.stem not in listed(user)
    user.remove(file.stem)
    check_whole(filled)


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
    assert len(user.entries()) == 3
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
    user = open_folder(filled)
    with user.find(IDENTITY, keys_of(SECOND)) as match:
        whole, altered = (part.node.name for part in match.parts)
        alter(match.parts[-1].path, -100)
        assert [*user.damages()] == [altered]
        assert "was altered" in user.damages()[altered]
        assert not user.remove_damaged(whole)
        with pytest.warns(UserWarning, match=REMOVED):
            assert user.remove_damaged(altered)
        # Who has it open, keeps the file; who opens it now, hears of it.
        with pytest.raises(CacheFileError, match="cannot be read: No such file"):
            match.parts[-1].open()
    assert all_found(user) == [300, 200, 100]
