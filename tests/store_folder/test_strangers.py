"""Files of others, of processes that have ended, links and owners."""

import os
from pathlib import Path

import pytest

from hf_hybrid_cache.prefix_store.errors import PrefixStoreFolderError

from store_folder.stored import keep, num_found, open_folder

NAME = "0" * 32
PROMPT = (1, 2, 3)


@pytest.mark.parametrize(
    "name", ["letter.txt", NAME, "0" * 31 + ".safetensors", "Z" * 32 + ".safetensors", f"{NAME}.safetensors.old"]
)
def test_files_of_others_when_among_nodes_then_stay(name: str, path: Path):
    keep(open_folder(path), PROMPT)
    (path / "nodes" / name).write_text("Dear")
    (path / "nodes" / f"{NAME}.safetensors").mkdir()
    (path / "prompts.sqlite").unlink()
    assert num_found(open_folder(path), PROMPT) == 3
    assert (path / "nodes" / name).read_text() == "Dear"


@pytest.mark.parametrize("name", ["letter.txt", "0" * 31, f"{NAME}.txt", "A" * 32, "." + "0" * 31])
def test_files_of_others_when_among_unfinished_ones_then_stay(name: str, path: Path):
    open_folder(path)
    (path / "unfinished" / name).write_text("Dear")
    (path / "unfinished" / NAME).write_text("left by a process that has ended")
    assert keep(open_folder(path), PROMPT)
    assert [each.name for each in (path / "unfinished").iterdir()] == [name]


def test_folder_with_other_files_is_refused_and_stays(path: Path):
    path.mkdir(0o755)
    (path / "letter.txt").write_text("Dear")
    with pytest.raises(PrefixStoreFolderError, match=r"is no store and has other files \(letter.txt\)"):
        open_folder(path)
    assert [each.name for each in path.iterdir()] == ["letter.txt"]
    assert path.stat().st_mode & 0o777 == 0o755
    (path / "letter.txt").unlink()
    assert keep(open_folder(path), PROMPT)
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.name == "nt", reason="makes links")
@pytest.mark.parametrize("name", ["unfinished", "nodes", "prompts.sqlite", "prompts.sqlite-journal"])
def test_part_of_a_store_when_a_link_then_refused_and_nothing_changes(name: str, path: Path):
    keep(open_folder(path), PROMPT)
    elsewhere = path.parent / "elsewhere"
    if (path / name).exists():
        (path / name).rename(elsewhere)
    else:
        elsewhere.write_text("Dear")
    (path / name).symlink_to(elsewhere)
    files = [each for each in path.parent.rglob("*") if each.is_file()]
    before = [each.read_bytes() for each in files]
    with pytest.raises(PrefixStoreFolderError, match=f"has {name}, which is a link|unable to open database file"):
        open_folder(path)
    assert [each.read_bytes() for each in files] == before


@pytest.mark.parametrize("name", ["unfinished", "nodes", "prompts.sqlite"])
def test_part_of_a_store_when_something_else_then_refused(name: str, path: Path):
    open_folder(path)
    (path / name).rename(path / "elsewhere")
    (path / name).mkdir() if name == "prompts.sqlite" else (path / name).write_text("Dear")
    with pytest.raises(PrefixStoreFolderError, match=f"has {name}, which is a link, something else"):
        open_folder(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a folder away")
@pytest.mark.parametrize("name", ["unfinished", "nodes", "prompts.sqlite"])
def test_part_of_a_store_when_of_another_user_then_refused(name: str, path: Path):
    open_folder(path)
    os.chown(path / name, 12345, 12345)
    with pytest.raises(PrefixStoreFolderError, match="or of another user"):
        open_folder(path)
