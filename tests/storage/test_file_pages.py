"""Pages of mapped files are given back, and nothing else is."""

import mmap
import sys
from pathlib import Path

import psutil
import pytest
import torch

from hf_hybrid_cache.storage import give_back_file_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what pages are")
NUM_BYTES = 64 * mmap.PAGESIZE


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """A file's numbers, mapped as transformers maps them: what is written stays in memory."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(256)) * (NUM_BYTES // 256))
    return torch.from_file(str(path), shared=False, size=NUM_BYTES, dtype=torch.uint8)


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return the resident bytes of the file that a tensor is mapped from."""
    (mapping,) = (each for each in psutil.Process().memory_maps() if each.path.endswith("/numbers"))
    return mapping.rss


def test_pages_of_a_file_are_given_back_and_come_again(mapped):
    before = mapped.sum()
    assert resident_bytes(mapped) == NUM_BYTES
    assert give_back_file_pages(mapped) == NUM_BYTES
    assert resident_bytes(mapped) == 0
    assert mapped.sum() == before


def test_pages_that_others_have_a_part_in_stay(mapped):
    mapped.sum()
    part = mapped[100 : 10 * mmap.PAGESIZE - 100]
    assert give_back_file_pages(part) == 8 * mmap.PAGESIZE
    assert resident_bytes(mapped) == NUM_BYTES - 8 * mmap.PAGESIZE
    assert give_back_file_pages(mapped[100:200]) == 0


def test_file_pages_when_written_to_then_are_kept(mapped):
    mapped[3 * mmap.PAGESIZE] = 99
    assert give_back_file_pages(mapped) == 0
    assert mapped[3 * mmap.PAGESIZE] == 99
    assert give_back_file_pages(mapped[4 * mmap.PAGESIZE :]) == NUM_BYTES - 4 * mmap.PAGESIZE


@pytest.mark.parametrize("num_bytes", [0, 10, 2**24])
def test_memory_that_is_no_file_is_left_alone(num_bytes):
    numbers = torch.ones(num_bytes, dtype=torch.uint8)
    assert give_back_file_pages(numbers) == 0
    assert numbers.sum() == num_bytes


def test_file_pages_when_tensor_is_not_contiguous_then_stay(mapped):
    assert give_back_file_pages(mapped.view(64, -1).t()) == 0
