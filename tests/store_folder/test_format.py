"""Folders of before can be read: the bytes of files stay the same, or the version changes."""

from hashlib import blake2b
from pathlib import Path

from prefix_folder.stored import open_folder

_OF_VERSION_1 = "96f608426922ce9c2c8983d17a809b9a"


def test_files_when_written_then_have_the_bytes_of_version_1(path: Path):
    folder, tokens = open_folder(path), [*range(130), 2**32 - 1]
    folder.add(b"a model", tokens[:130], 0, 5, lambda file: file.write(b"12345"), b"of a prompt")
    folder.add(b"a model", tokens, 128, 0, lambda file: None)
    digest = blake2b(digest_size=16)
    for file in sorted((path / "nodes").iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    index = (path / "index").read_bytes()
    # Without the header's random generation, and its checksum.
    digest.update(index[:20] + index[40:])
    assert digest.hexdigest() == _OF_VERSION_1
