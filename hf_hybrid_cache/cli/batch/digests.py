"""Digests of what an answer was made from: its documents and the model."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from ..choices import NAMED_MODELS

# Weights are too large to be read for a digest: their sizes and times tell of a change.
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")


def documents_digest(names: Sequence[str], folder: Path) -> str | None:
    """
    The digest of documents, and of all files in those that are folders; `None` where one is not there.

    Args:
        names: of files and folders.
        folder: names are relative to it.
    """
    digest = hashlib.sha256()
    try:
        for path in (folder / name for name in names):
            if not path.is_file() and not path.is_dir():
                return None
            for file in _files_in(path) if path.is_dir() else [path]:
                content = hashlib.sha256(file.read_bytes() if os.access(file, os.R_OK) else b"").hexdigest()
                digest.update(f"{file.relative_to(path)} {content}\n".encode(errors="surrogateescape"))
    except (OSError, ValueError):
        return None
    return digest.hexdigest()[:16]


def model_digest(name: str) -> str | None:
    """The digest of a model's files in their folder, or its commit on the Hub; `None` where it has neither."""
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            stats = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.suffix in _MODEL_FILES]
            told = repr([(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats])
            return hashlib.sha256(told.encode()).hexdigest()[:16]
        config = None if name in NAMED_MODELS else try_to_load_from_cache(name, "config.json")
    except (OSError, RuntimeError, ValueError):  # it cannot be loaded either, which says why
        return None
    return Path(config).parent.name if isinstance(config, str) else None


def _files_in(folder: Path) -> Iterable[Path]:
    """All files below a folder, sorted, without hidden ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(place, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())
