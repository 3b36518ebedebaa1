"""The device runs out of memory: copies that can be spared are given up, or the error says what to use instead."""

import weakref

import pytest
import torch

from hf_hybrid_cache import DeviceMemoryError, DynamicHybridCache, HybridCache, OffloadedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.storage.memory.buffer_memory import DeviceMemory, HostMemory, Piece

from models.tiny_models import random_prompt, tiny_model

# Keys and values of a layer of 300 tokens, with room to grow: 2 KV heads of 16 numbers in float32.
SLOT_BYTES = 2 * 576 * 2 * 16 * 4


class SmallDevice:
    """Refuses what device buffers of all layers take beyond its memory, as torch does; only that is pretended."""

    def __init__(self, num_bytes: int, monkeypatch: pytest.MonkeyPatch):
        self.num_bytes, self.times_refused = num_bytes, 0
        self._held: list[weakref.ref[torch.Tensor]] = []
        take = DeviceMemory.take

        def limited(memory: DeviceMemory, least: int, best: int, entry_bytes: int, kept: int = 0) -> Piece:
            if self.used() + best * entry_bytes > self.num_bytes:
                self.times_refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it.")
            piece = take(memory, least, best, entry_bytes, kept)
            self._held.append(weakref.ref(piece.data))
            return piece

        monkeypatch.setattr(DeviceMemory, "take", limited)

    def used(self) -> int:
        return sum(data.nbytes for held in self._held if (data := held()) is not None)


def generate(cache: HybridCache | None, num_tokens: int = 12) -> list[int]:
    model = tiny_model("llama")
    ids = random_prompt(1, 300)
    return model.generate(
        ids, **cache_argument(cache), max_new_tokens=num_tokens, do_sample=False, prefill_chunk_size=100
    )[0].tolist()


def offloaded(resident_layers: int = 3) -> HybridCache:
    return OffloadedHybridCache(tiny_model("llama").config, resident_layers=resident_layers, cpu_decode=False)


@pytest.mark.parametrize("slots", [1.5, 2.5])
def test_resident_layers_are_given_up_and_tokens_stay_the_same(slots: float, monkeypatch: pytest.MonkeyPatch):
    expected = generate(None)
    device = SmallDevice(int(slots * SLOT_BYTES), monkeypatch)
    cache = offloaded()
    with pytest.warns(UserWarning, match=r"ran out of memory: \d resident layers are streamed from now on"):
        assert generate(cache) == expected
    assert device.times_refused > 0
    assert device.used() <= device.num_bytes
    assert cache.stats.evictions > 0


def test_a_layer_that_has_no_room_is_told_and_not_lost(monkeypatch: pytest.MonkeyPatch):
    """The error says what to use instead. Where room is found after it, the same cache goes on."""
    expected = generate(None)
    device, cache = SmallDevice(SLOT_BYTES // 4, monkeypatch), offloaded()
    said = r"layer 0, which holds \d+ .*prefill_chunk_size=512.*Tried to allocate"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        generate(cache)
    assert device.times_refused > 0
    device.num_bytes = 10 * SLOT_BYTES
    cache.drop_unfinished()
    assert cache.get_seq_length() in (0, 100, 200)
    assert generate(cache) == expected


def test_a_cache_on_the_device_says_what_to_use_instead(monkeypatch: pytest.MonkeyPatch):
    def refuse(memory: HostMemory, piece: Piece, num_entries: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(HostMemory, "commit", refuse)  # a cache on the device has this memory where that is the CPU
    with pytest.raises(DeviceMemoryError, match=r"OffloadedHybridCache.*QuantizedHybridCache.*2\.00 GiB"):
        generate(DynamicHybridCache(tiny_model("llama").config, cpu_decode=False))
