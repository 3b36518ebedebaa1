"""Whose files are loaded as code: those of this user and of root, where nobody else can write."""

import os
from pathlib import Path

import pytest

from hf_hybrid_cache.system.user_folder import make_private_folders, why_not_trusted

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners and permissions of POSIX")
ANOTHER = 12345


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_private_folders(tmp_path / "home" / "kernels", tmp_path / "home")
    return tmp_path / "home"


def test_private_folders_and_those_of_the_system_are_trusted(home: Path):
    assert why_not_trusted(home / "kernels", home) is None
    assert why_not_trusted(home / "kernels" / "missing", home) is None
    user = os.geteuid()
    os.seteuid(ANOTHER if user == 0 else user)  # the system's are root's, and trusted by others
    try:
        assert why_not_trusted(Path("/usr/lib"), Path("/usr")) is None
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("place", "mode", "is_trusted"),
    [
        ("home/kernels", 0o702, False),
        ("home/kernels", 0o1777, False),
        ("home", 0o707, False),
        ("home", 0o1777, True),  # as /tmp
        ("", 0o777, False),
        ("", 0o1777, True),
        ("home", 0o755, True),
    ],
)
def test_a_folder_that_others_can_write_or_replace_is_not_trusted(
    place: str, mode: int, is_trusted: bool, tmp_path: Path, home: Path
):
    (tmp_path / place).chmod(mode)
    why = why_not_trusted(home / "kernels", home)
    assert why == (None if is_trusted else f"others can write to {tmp_path / place}")
    # A link to it is no way around.
    (tmp_path / "link").symlink_to(home)
    assert why_not_trusted(tmp_path / "link" / "kernels", tmp_path / "link") == why


def test_a_folder_of_another_user_or_group_is_not_trusted_even_by_root(home: Path):
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    os.chown(home, 0, ANOTHER)
    home.chmod(0o770)
    assert why_not_trusted(home / "kernels", home) == f"others can write to {home}"
    home.chmod(0o750)
    assert why_not_trusted(home / "kernels", home) is None
    os.chown(home / "kernels", ANOTHER, -1)
    assert why_not_trusted(home / "kernels", home) == f"{home / 'kernels'} belongs to another user, number {ANOTHER}"


def test_the_group_of_one_user_alone_may_write(home: Path):
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    user = pwd.getpwuid(os.geteuid())
    group = grp.getgrgid(user.pw_gid)
    if group.gr_name != user.pw_name or set(group.gr_mem) - {user.pw_name}:
        pytest.skip("this user has no group of their own")
    os.chown(home, -1, user.pw_gid)
    home.chmod(0o770)
    assert why_not_trusted(home / "kernels", home) is None
