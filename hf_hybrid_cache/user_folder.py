"""Where files are kept between runs."""

import os
from pathlib import Path


def cache_home() -> Path:
    """
    Folder for compiled kernels, converted models, measured speeds and what was typed.

    `$HF_HYBRID_CACHE_HOME`, else `$XDG_CACHE_HOME/hf_hybrid_cache`, else `~/.cache/hf_hybrid_cache`.

    Raises:
        FileNotFoundError: it is under the home folder, and there is none.
    """
    given = os.environ.get("HF_HYBRID_CACHE_HOME")
    try:
        return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hf_hybrid_cache").expanduser()
    except RuntimeError as error:
        raise FileNotFoundError("There is no home folder: set HF_HYBRID_CACHE_HOME to another one.") from error


def write_whole(path: Path, text: str) -> None:
    """
    Write a file in a folder that is made if it is not there: all of it, or what was there stays.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def make_private(path: Path) -> None:
    """
    Let a file be there, in a folder that is made if it is not, that its owner alone may read; what is in it stays.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    path.chmod(0o600)
