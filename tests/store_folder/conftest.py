"""Folders for the tests of the store."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from store_folder.stored import fill


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A folder that is not there yet, in memory where the system has such a place: thousands of files are synced."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder, "store")


@pytest.fixture
def filled(path: Path) -> Path:
    """A folder with three prompts."""
    fill(path)
    return path
