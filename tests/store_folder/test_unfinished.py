"""Files that are being written count with their whole size, and go when nobody writes them."""

import os
from pathlib import Path

import pytest

from hf_hybrid_cache.prefix_folder import PrefixStoreFolderError
from hf_hybrid_cache.prefix_folder.unfinished import Unfinished

from prefix_folder.stored import keep, num_found, open_folder

MIB = 2**20


@pytest.fixture
def unfinished(path: Path) -> Unfinished:
    open_folder(path)
    return Unfinished(path / "unfinished")


def test_file_when_written_then_needs_no_more_of_the_disk(unfinished: Unfinished):
    _, file = unfinished.begin(MIB)
    with file:
        assert unfinished.reserved() == (MIB, MIB)
        file.write(bytes(MIB // 2))
        assert unfinished.reserved() == (MIB, MIB // 2)
        file.write(bytes(MIB // 2))
        assert unfinished.reserved() == (MIB, 0)
    assert unfinished.reserved() == (0, 0)
    assert not list(unfinished.path.iterdir())


def test_file_that_cannot_have_its_size_leaves_nothing(unfinished: Unfinished):
    with pytest.raises(OSError, match="Invalid argument"):
        unfinished.begin(-1)
    assert not list(unfinished.path.iterdir())


@pytest.mark.parametrize(
    "name", ["letter.txt", "0" * 32, "0" * 30 + ".node", "z" * 32 + ".node", "A" * 32 + ".node.old", "unfinished"]
)
def test_files_of_others_when_among_ours_then_stay(name: str, path: Path):
    open_folder(path)
    (path / "nodes" / name).write_text("Dear")
    (path / "unfinished" / "folder").mkdir(exist_ok=True)
    (path / "index").unlink()
    user = open_folder(path)
    assert keep(user, (1, 2, 3))
    assert num_found(open_folder(path), (1, 2, 3)) == 3
    assert (path / "nodes" / name).read_text() == "Dear"


def letters_beside(path: Path) -> list[Path]:
    """Make letters beside a store, one of them with a name like ours, and return them."""
    letters = [path.parent / name for name in ("letter.txt", "0" * 32)]
    for letter in letters:
        letter.write_text("Dear")
    return letters


@pytest.mark.skipif(os.name == "nt", reason="makes links")
@pytest.mark.parametrize("name", ["unfinished", "nodes", "lock"])
def test_part_of_a_store_when_a_link_then_refused_and_nothing_is_removed(name: str, path: Path):
    letters = letters_beside(path)
    open_folder(path)
    part = path / name
    part.rename(path.parent / "elsewhere")
    part.symlink_to(".." if name != "lock" else path.parent / "elsewhere")
    with pytest.raises(PrefixStoreFolderError, match=f"has {name}, which is a link|symbolic links"):
        open_folder(path)
    assert [letter.read_text() for letter in letters] == ["Dear", "Dear"]


@pytest.mark.skipif(os.name == "nt", reason="makes links")
def test_index_when_a_link_then_only_the_link_goes(path: Path):
    keep(open_folder(path), (1, 2, 3))
    letter, _ = letters_beside(path)
    (path / "index").unlink()
    (path / "index").symlink_to(letter)
    assert num_found(open_folder(path), (1, 2, 3)) == 3
    assert letter.read_text() == "Dear"


def test_file_of_another_when_in_place_of_a_folder_then_refused(path: Path):
    open_folder(path)
    (path / "unfinished").rmdir()
    (path / "unfinished").write_text("Dear")
    with pytest.raises(PrefixStoreFolderError, match="has unfinished, which is a link, a file"):
        open_folder(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a folder away")
def test_part_of_a_store_when_of_another_user_then_refused(path: Path):
    open_folder(path)
    os.chown(path / "unfinished", 12345, 12345)
    with pytest.raises(PrefixStoreFolderError, match="or of another user"):
        open_folder(path)


@pytest.mark.parametrize("name", ["letter.txt", "0" * 31, "0" * 32 + ".txt", "A" * 32, "." + "0" * 31])
def test_files_of_others_when_among_unfinished_ones_then_stay(name: str, path: Path):
    open_folder(path)
    (path / "unfinished" / name).write_text("Dear")
    (path / "unfinished" / ("0" * 32)).write_text("left by a process that has ended")
    assert keep(open_folder(path), (1, 2, 3))
    assert [each.name for each in (path / "unfinished").iterdir()] == [name]


def test_folder_when_it_has_an_empty_lock_and_other_files_then_is_no_store(path: Path):
    path.mkdir(0o755)
    (path / "lock").touch()
    (path / "letter.txt").write_text("Dear")
    with pytest.raises(PrefixStoreFolderError, match="is no store"):
        open_folder(path)
    assert path.stat().st_mode & 0o777 == 0o755
    (path / "letter.txt").unlink()
    assert keep(open_folder(path), (1, 2, 3))


def test_working_directory_when_changed_then_the_store_stays_where_it_is(path: Path, monkeypatch: pytest.MonkeyPatch):
    path.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(path.parent)
    user = open_folder(Path("store"))
    monkeypatch.chdir("/")
    assert keep(user, (1, 2, 3))
    assert num_found(open_folder(path), (1, 2, 3)) == 3
