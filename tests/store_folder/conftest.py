"""Folders for the tests of the store."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from store_folder.stored import MEMORY, fill


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A folder that is not there yet, in memory where the system has such a place."""
    with tempfile.TemporaryDirectory(dir=MEMORY or tmp_path) as folder:
        yield Path(folder, "store")


@pytest.fixture
def filled(path: Path) -> Path:
    """A folder with three prompts."""
    fill(path)
    return path
