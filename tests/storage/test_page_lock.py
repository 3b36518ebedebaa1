"""Page-locking that the system refuses. What CUDA itself does is in `tests/test_cuda.py`."""

import warnings

import pytest
import torch

from hf_hybrid_cache.storage import page_lock
from hf_hybrid_cache.storage.block_buffer import BlockBuffer

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, as for a limit of locked memory


def test_refusals_are_told_once_and_the_memory_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch):
    refused = []
    monkeypatch.setattr(page_lock, "_has_warned", False)
    monkeypatch.setattr(page_lock, "_register", lambda address, *rest: refused.append(address) or OUT_OF_MEMORY)
    monkeypatch.setattr(page_lock, "_clear_error", lambda device: None)
    states = torch.randn(1, 2, 1000, 16)
    buffers = [
        BlockBuffer((1, 2, 16), torch.float32, role == 0, 20_000, torch.device("cuda", 0)) for role in (0, 1, 0, 1)
    ]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for start in range(0, 1000, 10):
            for buffer in buffers:
                buffer.ensure(start + 10, keep=start)
                buffer.write(start, states[:, :, start : start + 10])
    assert len(warned) == 1
    assert "refused to page-lock" in str(warned[0].message)
    assert len(refused) == len(buffers)
    assert all(torch.equal(buffer.read(1000), states) for buffer in buffers)
