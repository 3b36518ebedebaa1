"""The folder for files that are kept between runs."""

import os
import stat
from pathlib import Path


def cache_home() -> Path:
    """
    Return the folder for compiled kernels, converted models, measured speeds and the input history.

    `$HF_HYBRID_CACHE_HOME`, else `$XDG_CACHE_HOME/hf_hybrid_cache`, else `~/.cache/hf_hybrid_cache`.

    Raises:
        FileNotFoundError: it is under the home folder, and there is none.
    """
    given = os.environ.get("HF_HYBRID_CACHE_HOME")
    try:
        home = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hf_hybrid_cache").expanduser()
        return home.absolute()  # the working directory may change
    except RuntimeError as error:
        raise FileNotFoundError("There is no home folder: set HF_HYBRID_CACHE_HOME to another one.") from error


def make_private(path: Path) -> None:
    """Make a file that only its owner can read, and its folder; an existing file keeps its contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    path.chmod(0o600)


def make_private_folders(folder: Path, home: Path) -> bool:
    """Make a folder, and those from `home` on above it, each for its owner alone; return whether it was missing."""
    if folder.is_dir():
        return False
    if folder == home:
        folder.parent.mkdir(parents=True, exist_ok=True)
    else:
        make_private_folders(folder.parent, home)
    folder.mkdir(mode=0o700, exist_ok=True)
    return True


def why_not_trusted(folder: Path, home: Path) -> str | None:
    """
    Say why what is in a folder may be from another user; `None` if it is from this one, or from root.

    Others must not be able to write to it, or to put another folder in the place of one that it is in. Of one that is
    missing those above it are asked about. Above `home` a group is trusted.
    """
    if not hasattr(os, "geteuid"):
        return None
    folder, home = (Path(os.path.realpath(each)) for each in (folder, home))
    for each in (folder, *folder.parents):
        try:
            status = each.stat()
        except OSError:  # it is missing, or nothing can be read from it either
            continue
        is_own = each.is_relative_to(home)
        if is_own and status.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to another user, number {status.st_uid}"
        # With the sticky bit, as in /tmp, others cannot replace what is in it; they can add to it.
        if each != folder and status.st_mode & stat.S_ISVTX:
            continue
        by_group = is_own and status.st_mode & stat.S_IWGRP and not _is_group_of_one(status.st_gid)
        if by_group or status.st_mode & stat.S_IWOTH:
            return f"others can write to {each}"
    return None


def _is_group_of_one(group: int) -> bool:
    """Whether a group is that which many systems make for this user alone."""
    import grp
    import pwd

    try:
        user, named = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (group, named.gr_name) == (user.pw_gid, user.pw_name) and not {*named.gr_mem} - {user.pw_name}
