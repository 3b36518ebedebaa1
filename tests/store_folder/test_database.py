"""A database that others changed: nothing hangs, and what it lost or forgot, the files have."""

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache.prefix_store.errors import NodeNotFoundError
from hf_hybrid_cache.prefix_store.keys import as_bytes, end_digests, identity_digest

from store_folder.stored import (
    FIRST,
    IDENTITY,
    LENGTHS,
    THIRD,
    all_found,
    check_whole,
    execute,
    keep,
    keys_of,
    num_found,
    open_folder,
)


@pytest.fixture
def database(filled: Path) -> Path:
    """The database of a store with three prompts."""
    return filled / "prompts.sqlite"


def test_database_of_before_when_put_back_then_agrees_with_the_files(database: Path):
    user, before = open_folder(database.parent), database.read_bytes()
    user.remove(next(entry.node.name for entry in user.entries() if entry.node.end == 100))
    assert keep(user, (*FIRST, 7))
    database.write_bytes(before)
    late = open_folder(database.parent)
    assert all_found(late) == [300, 300, 0]
    assert num_found(user, (*FIRST, 7)) == 301
    check_whole(database.parent)


@pytest.mark.parametrize(
    "parents",
    [{10: (11, 64), 11: (10, 64)}, {10: (None, 64)}, {10: (3, 192)}],
    ids=["a circle", "a start without tokens", "a hole"],
)
def test_rows_when_parents_are_in_no_order_then_nothing_hangs(parents: dict[int, tuple[int, int]], database: Path):
    keys, first = as_bytes(keys_of(FIRST)), identity_digest(IDENTITY)
    digests = [first, *end_digests(first, keys)]
    rows = [
        f"INSERT INTO node SELECT {own_id}, '{own_id:032x}', {parent or 'NULL'}, '{digests[start]}', "
        f"'{digests[-1]}', {start}, x'{keys[4 * start :].hex()}', file_bytes, '' FROM node WHERE id = 1"
        for own_id, (parent, start) in parents.items()
    ]
    execute(database, *rows)
    user = open_folder(database.parent)  # which finds no files of these
    assert len(user.entries()) == 4
    execute(database, *rows)
    keep(user, FIRST[:100])
    for own_id in parents:
        with pytest.raises(NodeNotFoundError):
            user.keys(f"{own_id:032x}")
        assert num_found(user, FIRST) == len(FIRST)
        user.remove(f"{own_id:032x}")


def test_database_when_it_claims_more_than_memory_then_is_read(database: Path):
    os.truncate(database, 2**42)
    assert all_found(open_folder(database.parent)) == LENGTHS


def test_search_among_many_prompts_reads_few_rows(database: Path, monkeypatch: pytest.MonkeyPatch):
    user = open_folder(database.parent)
    execute(
        database,
        "WITH RECURSIVE number (n) AS (SELECT 1000 UNION ALL SELECT n + 1 FROM number WHERE n < 11000) "
        "INSERT INTO node SELECT NULL, printf('%032x', n), NULL, prefix, printf('%032x', n), 0, "
        "CAST(substr(keys, 1, 120) || printf('%08d', n) AS BLOB), 9, '' FROM node, number WHERE id = 1",
    )
    steps, connect = list[None](), sqlite3.connect

    def watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_progress_handler(lambda: steps.append(None), 100)
        return connection

    monkeypatch.setattr(sqlite3, "connect", watched)
    with user.find(IDENTITY, keys_of((7,))) as match:
        user.nearest(IDENTITY, keys_of(THIRD), match)
    assert num_found(user, THIRD) == len(THIRD)
    assert len(steps) < 20
