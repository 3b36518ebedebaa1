"""Every store of keys and values: on the device, in host memory, streamed, split, quantized and shared."""

import pytest
import torch
from contracts.buffers import token_in_memory
from contracts.stores import CONFIG, Pair, StoreContract
from torch import distributed

from hf_hybrid_cache import HybridCache, Placement, minmax
from hf_hybrid_cache.storage import BufferedStore, KVStore, QuantizedStore, ShardedStore, SplitStore
from hf_hybrid_cache.storage.token_buffer import TokenBuffer

from common.caches import group_of_one


def entries(buffer: TokenBuffer, num_entries: int) -> torch.Tensor:
    """`[batch, num_kv_heads, entries, head_dim]`, one after the other, as they lie in memory."""
    found = [token_in_memory(buffer, index) for index in range(num_entries)]
    return torch.stack(found, 2) if found else buffer._data.new_empty(*buffer.shape[:2], 0, buffer.shape[2])


def plain(store: BufferedStore) -> Pair:
    return entries(store.keys, store.num_tokens), entries(store.values, store.num_tokens)


def quantized(store: QuantizedStore) -> Pair:
    """Decode the packed blocks by the codec, which has tests of its own."""
    whole = []
    for codec, full, packed in zip(
        (store.codec.keys, store.codec.values), plain(store.full), plain(store.packed), strict=True
    ):
        decoded = full.new_empty(*full.shape[:2], packed.shape[2] * 64, full.shape[3])
        codec.decode(packed, decoded)
        first = min(store.sink_tokens, full.shape[2])
        whole.append(torch.cat([full[:, :, :first], decoded, full[:, :, first:]], 2))
    return whole[0], whole[1]


def around(device: BufferedStore, middle: Pair, first: int) -> Pair:
    """The last tokens on a device follow the first ones there."""
    keys, values = (
        torch.cat([ends[:, :, :first], between, ends[:, :, first:]], 2)
        for ends, between in zip(plain(device), middle, strict=True)
    )
    return keys, values


class TestOnTheDevice(StoreContract):
    placement = Placement(cpu_decode=False)

    def in_memory(self, store: KVStore) -> Pair:
        assert isinstance(store, BufferedStore)
        return plain(store)


class TestInHostMemory(TestOnTheDevice):
    placement = Placement(cpu_decode=True)


class TestStreamed(TestOnTheDevice):
    placement = Placement(offload=True, cpu_decode=False)


class TestSplit(StoreContract):
    placement = Placement(cpu_decode=True, device_tokens=192)

    def in_memory(self, store: KVStore) -> Pair:
        assert isinstance(store, SplitStore)
        assert isinstance(store.host, BufferedStore)
        return around(store.device, plain(store.host), store.first_tokens)


class TestSplitAndStreamed(TestSplit):
    placement = Placement(offload=True, cpu_decode=False, device_tokens=130)


class TestQuantizedOnTheDevice(StoreContract):
    placement = Placement(cpu_decode=False)
    codec = minmax(4, rotate=True)

    def in_memory(self, store: KVStore) -> Pair:
        assert isinstance(store, QuantizedStore)
        return quantized(store)


class TestQuantizedInHostMemory(TestQuantizedOnTheDevice):
    placement = Placement(cpu_decode=True)
    codec = minmax(8, sink_tokens=0, rotate=True)


class TestQuantizedAndStreamed(TestQuantizedOnTheDevice):
    placement = Placement(offload=True, cpu_decode=False)
    codec = minmax((8, 4), rotate=False)


class TestQuantizedAndSplit(StoreContract):
    placement = Placement(cpu_decode=True, device_tokens=192)
    codec = minmax(8, rotate=True)

    def in_memory(self, store: KVStore) -> Pair:
        assert isinstance(store, SplitStore)
        assert isinstance(store.host, QuantizedStore)
        return around(store.device, quantized(store.host), store.first_tokens)


@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no process groups")
class TestSharedWithNobody(StoreContract):
    placement = Placement(cpu_decode=True)

    def cache(self) -> HybridCache:
        return HybridCache(CONFIG, self.placement, group=group_of_one())

    def in_memory(self, store: KVStore) -> Pair:
        assert isinstance(store, ShardedStore)
        assert isinstance(store.local, BufferedStore)
        return plain(store.local)
