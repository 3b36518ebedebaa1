"""Page-locking that the system refuses, and unlocking. What CUDA itself does is in `tests/memory/test_cuda.py`."""

import gc
import os
import warnings

import pytest
import torch

from hf_hybrid_cache.storage.memory import page_lock
from hf_hybrid_cache.storage.memory.buffer_memory import HostMemory
from hf_hybrid_cache.storage.runs.block_buffer import BlockBuffer

CUDA = torch.device("cuda", 0)
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, as for a limit of locked memory


def test_refusals_are_told_once_and_the_memory_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch):
    refused = []
    monkeypatch.setattr(page_lock, "_has_warned", False)
    monkeypatch.setattr(page_lock, "_register", lambda address, *rest: refused.append(address) or OUT_OF_MEMORY)
    monkeypatch.setattr(page_lock, "_clear_error", lambda device: None)
    states = torch.randn(1, 2, 1000, 16)
    buffers = [
        BlockBuffer((1, 2, 16), torch.float32, HostMemory(20_000, pinned_for=CUDA), role == 0) for role in (0, 1, 0, 1)
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
    assert all(torch.equal(buffer.read_range(0, 1000), states) for buffer in buffers)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Record the addresses that are locked, without CUDA."""
    addresses: set[int] = set()
    monkeypatch.setattr(page_lock, "_register", lambda address, *rest: addresses.add(address) or 0)
    monkeypatch.setattr(page_lock, "_unregister", lambda given, device: addresses.difference_update(given))
    return addresses


def a_locked_buffer() -> BlockBuffer:
    buffer = BlockBuffer((1, 2, 16), torch.float32, HostMemory(20_000, pinned_for=CUDA), True)
    buffer.ensure(100, keep=0)
    return buffer


def test_unlocking_when_a_cuda_graph_is_recorded_then_is_deferred(
    registered: set[int], monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as recording:
        recording.setattr(page_lock, "_is_recording_graph", lambda: True)
        buffers = [a_locked_buffer() for _ in range(2)]
        locked = set(registered)
        del buffers
        gc.collect()
        assert registered == locked
    other = a_locked_buffer()
    assert registered.isdisjoint(locked)
    assert registered
    del other


def test_a_forked_child_unlocks_nothing(registered: set[int]):
    buffer = a_locked_buffer()
    locked = set(registered)
    child = os.fork()
    if child == 0:
        del buffer
        gc.collect()
        os._exit(registered != locked)
    assert os.waitpid(child, 0)[1] == 0
    del buffer
    gc.collect()
    assert not registered
