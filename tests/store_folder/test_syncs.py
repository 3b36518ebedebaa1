"""A system that stops leaves a whole folder: what a change needs is on the disk before the change is made."""

import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from store_folder.stored import keep, open_folder


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for the names of open files")
def test_changes_when_made_then_come_to_the_disk_in_order(path: Path, monkeypatch: pytest.MonkeyPatch):
    user = open_folder(path)
    events: list[str] = []

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(file: Any, *others: Any, **options: Any) -> Any:
            place = Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file).relative_to(path)
            if name == "fsync" or os.path.exists(file):
                events.append(f"{name} {place.parts[0]}{'/...' * (len(place.parts) > 1)}")
            return function(file, *others, **options)

        monkeypatch.setattr(owner, name, watched)

    connect = sqlite3.connect

    def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(lambda statement: events.append(statement.split()[0]))
        return connection

    monkeypatch.setattr(sqlite3, "connect", connected)
    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
        watch(owner, name)
    keep(user, tuple(range(100)))
    file = "fsync unfinished/...", "BEGIN", "replace unfinished/...", "fsync nodes", "INSERT", "COMMIT"
    assert tuple(each for each in events if each not in ("PRAGMA", "SELECT"))[-6:] == file
    name = user.entries()[0].node.name
    events.clear()
    user.remove(name)
    removal = "BEGIN", "unlink nodes/...", "fsync nodes", "DELETE", "COMMIT"
    assert tuple(each for each in events if each not in ("PRAGMA", "SELECT")) == removal
