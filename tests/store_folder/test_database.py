"""The database of a folder says what is there; what it lost, the files have."""

import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache.prefix_store.errors import NodeNotFoundError, PrefixStoreFolderError
from hf_hybrid_cache.prefix_store.keys import as_bytes, prefix_digests

from store_folder.stored import BLOCK, IDENTITY, Tokens, keep, keys_of, num_found, open_folder
from store_folder.test_damage import alter
from store_folder.trials import check_whole

PROMPTS: list[Tokens] = [tuple(range(number, number + 200)) for number in range(5)]


@pytest.fixture
def database(path: Path) -> Path:
    """The database of a store with five prompts."""
    for tokens in PROMPTS:
        keep(open_folder(path), tokens)
    return path / "prompts.sqlite"


def execute(database: Path, *statements: str) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def empty_beside_a_hot_journal(database: Path) -> None:
    with closing(connection_that_changes(database)):
        shutil.copy(f"{database}-journal", database.parent / "hot")
    DAMAGES["empty"](database)
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
        "UPDATE node SET start = 64, description = hex(randomblob(9000))",
    ):
        connection.execute(statement)
    assert Path(f"{database}-journal").stat().st_size > 4096
    return connection


def alter_keys(database: Path, place: int) -> None:
    """Alter the keys of a prompt where they are in the table, or in the index."""
    keys, content = as_bytes(keys_of(PROMPTS[4])), database.read_bytes()
    places = [match.start() for match in re.finditer(re.escape(keys[-40:]), content)]
    assert len(places) == 2
    alter(database, places[place])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "half of it": lambda database: os.truncate(database, database.stat().st_size // 2),
    "gone": Path.unlink,
    "empty": lambda database: database.write_bytes(b""),
    "foreign": lambda database: database.write_bytes(b"\x89PNG" + bytes(9000)),
    "other tables": lambda database: execute(database, "ALTER TABLE node ADD COLUMN more"),
    "no index": lambda database: execute(database, "DROP INDEX node_prefix"),
    "no node": lambda database: execute(database, "INSERT INTO node VALUES (9, '../letter', 1, x'', 0, x'', 0, '')"),
    "an altered row": lambda database: alter_keys(database, 0),
    "an altered index": lambda database: alter_keys(database, 1),
    "a hot journal": empty_beside_a_hot_journal,
    "torn": be_torn,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_database_when_damaged_or_lost_then_is_made_again(damage: str, database: Path):
    known = open_folder(database.parent)
    before = [(entry.node.name, entry.description) for entry in known.entries()]
    DAMAGES[damage](database)
    with pytest.warns(UserWarning, match="It is made again from the files"):
        found, damages = [num_found(known, tokens) for tokens in PROMPTS], known.damages()
    assert set(found) <= {0, 200}
    assert damages == {}
    for user in (known, open_folder(database.parent)):
        assert sorted((entry.node.name, entry.description) for entry in user.entries()) == sorted(before)
        assert [num_found(user, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
    check_whole(database.parent)


def test_database_of_before_when_put_back_then_agrees_with_the_files(database: Path):
    user, before = open_folder(database.parent), database.read_bytes()
    gone = user.entries()[0].node.name
    user.remove(gone)
    assert keep(user, (*PROMPTS[0], 7))
    database.write_bytes(before)
    names = {each.stem for each in (database.parent / "nodes").iterdir()}
    assert gone not in names
    late = open_folder(database.parent)
    assert {entry.node.name for entry in late.entries()} == names
    assert num_found(user, (*PROMPTS[0], 7)) == len(PROMPTS[0]) + 1
    check_whole(database.parent)


@pytest.mark.parametrize(
    "parents",
    [{10: (10, 64)}, {10: (11, 64), 11: (10, 64)}, {10: (99, 64)}, {10: (None, 64)}, {10: (1, 0)}, {10: (6, 192)}],
    ids=["itself", "two", "none", "a start without tokens", "no start", "a hole"],
)
def test_rows_when_parents_are_in_no_order_then_nothing_hangs(parents: dict[int, tuple[int, int]], database: Path):
    digests = prefix_digests(IDENTITY, keys := as_bytes(keys_of(PROMPTS[4])))
    rows = [
        f"INSERT INTO node SELECT {own_id}, '{own_id:032x}', {parent or 'NULL'}, '{digests[start // BLOCK]}', "
        f"{start}, x'{keys[4 * start :].hex()}', file_bytes, '' FROM node WHERE id = 1"
        for own_id, (parent, start) in parents.items()
    ]
    execute(database, *rows)
    user = open_folder(database.parent)  # which finds no files of these
    assert len(user.entries()) == len(PROMPTS)
    execute(database, *rows)
    keep(user, PROMPTS[4][:100])
    for own_id in parents:
        with pytest.raises(NodeNotFoundError):
            user.keys(f"{own_id:032x}")
        assert num_found(user, PROMPTS[4]) == len(PROMPTS[4])
        user.remove(f"{own_id:032x}")


def be_of_another_program(database: Path) -> None:
    database.unlink()
    execute(database, "CREATE TABLE letter (text)")


def be_of_the_format_before(database: Path) -> None:
    database.rename(database.with_name("index"))
    (database.parent / "lock").write_bytes(b"A store of prompts of hf_hybrid_cache, version 1\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda database: execute(database, "PRAGMA user_version = 3"),
            "is a prefix store of version 3, and this one is 2: give another folder",
        ),
        (be_of_another_program, "has prompts.sqlite of another program: give another folder"),
        (be_of_the_format_before, "is a store of an earlier version, which this one does not read"),
    ],
)
def test_folder_of_another_kind_is_refused_and_stays(change: Callable[[Path], None], reason: str, database: Path):
    known = open_folder(database.parent)
    change(database)
    before = {each: each.is_file() and each.read_bytes() for each in database.parent.rglob("*")}
    with pytest.raises(PrefixStoreFolderError, match=reason):
        open_folder(database.parent)
    if database.exists():
        for use in (known.entries, known.damages, lambda: keep(known, (1,))):
            with pytest.raises(PrefixStoreFolderError, match=reason):
                use()
    assert {each: each.is_file() and each.read_bytes() for each in database.parent.rglob("*")} == before


def test_database_when_it_claims_more_than_memory_then_is_read(database: Path):
    os.truncate(database, 2**42)
    user = open_folder(database.parent)
    assert [num_found(user, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]


def test_search_among_many_prompts_reads_few_rows(database: Path, monkeypatch: pytest.MonkeyPatch):
    user = open_folder(database.parent)
    execute(
        database,
        "WITH RECURSIVE number (n) AS (SELECT 1000 UNION ALL SELECT n + 1 FROM number WHERE n < 11000) "
        "INSERT INTO node SELECT NULL, printf('%032x', n), NULL, prefix, 0, CAST(substr(keys, 1, 120) || "
        "printf('%08d', n) AS BLOB), 9, '' FROM node, number WHERE id = 1",
    )
    steps, connect = list[None](), sqlite3.connect

    def watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_progress_handler(lambda: steps.append(None), 100)
        return connection

    monkeypatch.setattr(sqlite3, "connect", watched)
    assert num_found(user, PROMPTS[0]) == len(PROMPTS[0])
    assert len(steps) < 20
