"""Files that are being written count with their whole size, and go when nobody writes them."""

from pathlib import Path

import pytest

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
