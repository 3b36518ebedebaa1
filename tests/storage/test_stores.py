"""Every store of keys and values: on the device, in host memory, streamed, split, quantized and shared."""

import pytest
import torch
from contracts.buffers import token_in_memory
from contracts.stores import CONFIG, Pair, StoreContract
from torch import distributed

from hf_hybrid_cache import HybridCache, Placement, minmax
from hf_hybrid_cache.storage import Run, Store
from hf_hybrid_cache.storage.runs.token_buffer import TokenBuffer

from common.caches import group_of_one


def entries(buffer: TokenBuffer, num_entries: int) -> torch.Tensor:
    """`[batch, num_kv_heads, entries, head_dim]`, one after the other, as they lie in memory."""
    found = [token_in_memory(buffer, index) for index in range(num_entries)]
    return torch.stack(found, 2) if found else buffer.stored_rows(0).new_empty(*buffer.shape[:2], 0, buffer.shape[2])


def plain(segment: Run) -> Pair:
    return entries(segment.keys, segment.num_entries), entries(segment.values, segment.num_entries)


def middle(store: Store) -> Pair:
    """Decode the packed blocks by the codec, which has tests of its own."""
    if store.packed is None:
        return plain(store.dense)
    codec, whole = store.codec, []
    for each, full, packed in zip((codec.keys, codec.values), plain(store.dense), plain(store.packed), strict=True):
        decoded = full.new_empty(*full.shape[:2], packed.shape[2] * 64, full.shape[3])
        each.decode(packed, decoded)
        first = min(store.sink_tokens, full.shape[2])
        whole.append(torch.cat([full[:, :, :first], decoded, full[:, :, first:]], 2))
    return whole[0], whole[1]


def around(device: Run, middle: Pair, first: int) -> Pair:
    """The last tokens on a device follow the first ones there."""
    keys, values = (
        torch.cat([ends[:, :, :first], between, ends[:, :, first:]], 2)
        for ends, between in zip(plain(device), middle, strict=True)
    )
    return keys, values


class EverySegment(StoreContract):
    def in_memory(self, store: Store) -> Pair:
        found = middle(store)
        return found if store.ends is None else around(store.ends, found, store.first_tokens)


class TestOnTheDevice(EverySegment):
    placement = Placement(cpu_decode=False)


class TestInHostMemory(EverySegment):
    placement = Placement(cpu_decode=True)


class TestStreamed(EverySegment):
    placement = Placement(offload=True, cpu_decode=False)


class TestSplit(EverySegment):
    placement = Placement(cpu_decode=True, device_tokens=192)


class TestSplitAndStreamed(EverySegment):
    placement = Placement(offload=True, cpu_decode=False, device_tokens=130)


class TestQuantizedOnTheDevice(EverySegment):
    placement = Placement(cpu_decode=False)
    codec = minmax(4, rotate=True)


class TestQuantizedInHostMemory(EverySegment):
    placement = Placement(cpu_decode=True)
    codec = minmax(8, sink_tokens=0, rotate=True)


class TestQuantizedAndStreamed(EverySegment):
    placement = Placement(offload=True, cpu_decode=False)
    codec = minmax((8, 4), rotate=False)


class TestQuantizedAndSplit(EverySegment):
    placement = Placement(cpu_decode=True, device_tokens=192)
    codec = minmax(8, rotate=True)


@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no process groups")
class TestSharedWithNobody(EverySegment):
    placement = Placement(cpu_decode=True)

    def cache(self) -> HybridCache:
        return HybridCache(CONFIG, self.placement, group=group_of_one())
