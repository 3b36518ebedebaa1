"""A system that stops leaves a whole folder: what a change needs is on the disk before the change is made."""

import os
from pathlib import Path
from typing import Any

import pytest
from hf_hybrid_cache.prefix_folder.index_file import IndexFile

from prefix_folder.stored import keep, num_found, open_folder

PROMPT = tuple(range(100))


class Events(list[str]):
    """The syncs, renames and removals in a folder, as they come."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.path = path
        fsync, replace, unlink = os.fsync, os.replace, Path.unlink

        def watched_fsync(handle: int) -> None:
            self.append(f"sync {self.name_of(handle)}")
            fsync(handle)

        def watched_replace(source: Path, target: Path) -> None:
            self.append(f"rename {self.name(Path(source))} to {self.name(Path(target))}")
            replace(source, target)

        def watched_unlink(file: Path, missing_ok: bool = False) -> None:
            if file.exists():
                self.append(f"remove {self.name(file)}")
            unlink(file, missing_ok)

        for owner, name, function in (
            (os, "fsync", watched_fsync),
            (os, "replace", watched_replace),
            (Path, "unlink", watched_unlink),
        ):
            monkeypatch.setattr(owner, name, function)

    def name(self, file: Path) -> str:
        """A file's name, or for those that have no name of their own that of the folder they are in."""
        parts = file.relative_to(self.path).parts
        return f"{parts[0]}/..." if len(parts) > 1 else "".join(parts)

    def name_of(self, handle: int) -> str:
        status = os.fstat(handle)
        return next(
            self.name(each) for each in (self.path, *self.path.rglob("*")) if os.path.samestat(each.stat(), status)
        )


@pytest.fixture
def events(path: Path, monkeypatch: pytest.MonkeyPatch) -> Events:
    open_folder(path)
    return Events(path, monkeypatch)


def test_folder_when_made_then_its_mark_and_index_are_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch):
    events: list[str] = Events(path, monkeypatch)
    open_folder(path)
    assert events == ["sync lock", "sync unfinished/...", "rename unfinished/... to index", "sync "]


def test_node_when_added_then_file_and_record_are_there_before_its_name(path: Path, events: Events):
    keep(open_folder(path), PROMPT)
    assert events == ["sync unfinished/...", "sync index", "rename unfinished/... to nodes/...", "sync nodes"]


def test_node_when_removed_then_its_record_goes_after_its_file(path: Path, events: Events):
    user = open_folder(path)
    keep(user, PROMPT)
    events.clear()
    user.remove(user.entries()[0].id)
    assert events == ["remove nodes/...", "sync nodes", "sync index"]


def test_index_when_replaced_then_is_whole_before_it_has_its_name(path: Path, events: Events):
    IndexFile(path / "index").replace([], path / "unfinished" / "0")
    assert events == ["sync unfinished/...", "rename unfinished/... to index", "sync "]


def test_node_when_it_cannot_have_its_name_then_can_be_kept_later(path: Path, monkeypatch: pytest.MonkeyPatch):
    user = open_folder(path)

    def refuse(*paths: Any) -> None:
        raise OSError("No")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="cannot be changed: No"):
            keep(user, PROMPT)
    assert keep(user, PROMPT)
    assert num_found(open_folder(path), PROMPT) == len(PROMPT)
    assert not list((path / "unfinished").iterdir())
