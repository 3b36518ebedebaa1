"""A written file takes the place of an older one whole, with its permissions, and of nothing else."""

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hf_hybrid_cache import CacheFileError, DynamicHybridCache
from hf_hybrid_cache.system import durable_files
from hf_hybrid_cache.system.durable_files import replaced_when_whole

from models.tiny_models import FAMILIES

CONFIG = FAMILIES["llama"]()
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs links, pipes and permissions of POSIX")


@pytest.fixture(params=["files without names", "named files"])
def has_nameless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """Whether the file system gives files without names; some do not."""
    if request.param == "named files":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        return False
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY))
    except (AttributeError, OSError):
        pytest.skip("there are no files without names here")
    return True


def written(path: Path, content: bytes = b"new") -> None:
    with replaced_when_whole(path) as file:
        file.write(content)


@pytest.mark.usefixtures("has_nameless")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_when_written_to_then_stays_and_leads_to_the_new_content(is_there: bool, tmp_path: Path):
    target, links = tmp_path / "folder" / "target", [tmp_path / "link", tmp_path / "second"]
    target.parent.mkdir()
    if is_there:
        target.write_bytes(b"older")
    links[0].symlink_to(Path("folder", "target"))
    links[1].symlink_to(links[0])
    written(links[1])
    assert all(link.is_symlink() for link in links)
    assert target.read_bytes() == b"new"
    assert {*tmp_path.rglob("*")} == {*links, target, target.parent}


def test_links_that_lead_to_each_other_are_refused(tmp_path: Path):
    (tmp_path / "one").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    with pytest.raises(OSError, match="Too many levels"):
        written(tmp_path / "one")
    with pytest.raises(CacheFileError, match="was not written: Too many levels"):
        DynamicHybridCache(CONFIG).save(tmp_path / "one")


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except OSError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("make", [os.mkfifo, make_device])
@pytest.mark.parametrize("is_linked", [True, False])
def test_a_device_or_a_pipe_is_refused_and_stays(make, is_linked: bool, tmp_path: Path):
    path = special = tmp_path / "special"
    make(special)
    before = special.lstat()
    if is_linked:
        path = tmp_path / "link"
        path.symlink_to(special)
    with pytest.raises(OSError, match="not a file") as raised:
        written(path)
    assert raised.value.errno == errno.EINVAL
    with pytest.raises(CacheFileError, match=r"was not written: It is a device, a pipe or a socket, not a file\.$"):
        DynamicHybridCache(CONFIG).save(path)
    assert special.lstat() == before


@pytest.mark.usefixtures("has_nameless")
@pytest.mark.parametrize("mode", [0o640, 0o444])
def test_a_replaced_file_keeps_its_permissions_and_owner(mode: int, tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"older")
    if os.geteuid() == 0:  # who alone gives files away
        os.chown(path, 12345, 23456)
    path.chmod(mode)
    before = path.stat()
    with replaced_when_whole(path) as file:
        # A private file is private while it is written, too.
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
        file.write(b"new")
    after = path.stat()
    assert path.read_bytes() == b"new"
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)


@pytest.mark.usefixtures("has_nameless")
def test_a_new_file_has_the_permissions_of_other_new_files(tmp_path: Path):
    before = os.umask(0o027)
    try:
        (tmp_path / "other").touch()
        written(tmp_path / "file")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "other")}
    assert modes == {0o640}


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from durable_files import replaced_when_whole
from pathlib import Path
with replaced_when_whole(Path(sys.argv[2])) as file:
    file.write(bytes(1_000_000))
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_when_killed_then_leaves_the_older_file_alone(has_nameless: bool, tmp_path: Path):
    if not has_nameless:
        pytest.skip("where files need a name a killed process leaves one")
    path = tmp_path / "file"
    path.write_bytes(b"older")
    command = [sys.executable, "-c", KILLED, str(Path(durable_files.__file__).parent), str(path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("has_nameless")
def test_a_file_when_writing_fails_then_the_older_one_stays(tmp_path: Path):
    written(tmp_path / "file", b"older")
    with pytest.raises(TypeError):
        written(tmp_path / "file", "text")  # type: ignore[arg-type]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"older")]
