"""The folder for files that are kept between runs."""

import os
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


def write_whole(path: Path, text: str) -> None:
    """
    Write a whole file, or leave the old one; its folder is made if needed.

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
    Make a file that only its owner can read, and its folder; an existing file keeps its contents.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    path.chmod(0o600)
