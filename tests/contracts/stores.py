"""
The contract of every store of a layer's keys and values: any history leaves what plain tensors hold.

A variant says where the states are and in which form; the machine draws the sizes, and checks after each change what
is read, where the borders are, and that reading changes nothing. One use, for a new place:

    run_state_machine_as_test(machine_of(Variant({"cpu_decode": True}, is_split=True)))
"""

import copy
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import LlamaConfig

from hf_hybrid_cache import HybridCache, KVCodec, Placement, minmax
from hf_hybrid_cache.storage import (
    GRANULE,
    InitialCapacity,
    KVShape,
    Layout,
    OneSequence,
    Pair,
    Segment,
    Shard,
    SplitStore,
)

from common.caches import group_of_one
from common.lazy_streams import copy_late

BLOCK = GRANULE
BATCH, NUM_KV_HEADS, KEY_DIM, VALUE_DIM = 2, 3, 16, 24
OF_4_BITS = minmax(4, rotate=True)
CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=8)


def random_states(num_tokens: int, seed: int = 0, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(batch, NUM_KV_HEADS, num_tokens, dim, generator=generator).to(dtype) for dim in (KEY_DIM, VALUE_DIM)
    )
    return keys, values


class Sizes(NamedTuple):
    """
    Sizes of a store, which a machine draws.

    Attributes:
        device_tokens: of a split one.
        codec: of a quantized one.
        shard: of several processes.
        dtype: of the states.
        host_tokens: address space is reserved for so many at first.
    """

    device_tokens: int = 192
    codec: KVCodec = OF_4_BITS
    shard: Shard = Shard.ALL
    dtype: torch.dtype = torch.float32
    host_tokens: int = 131_072


USUAL = Sizes()


class Variant(NamedTuple):
    """
    A kind of stores.

    Attributes:
        placement: arguments of the layer's `Placement`.
        is_split: both ends of the sequence are on the device.
        is_quantized: old blocks are packed.
        copies_late: streamed, with copies that run as late as they may.
        is_shared: in a group of one process.
    """

    placement: dict[str, Any]
    is_split: bool = False
    is_quantized: bool = False
    copies_late: bool = False
    is_shared: bool = False

    def make(self, sizes: Sizes = USUAL, batch: int = BATCH) -> tuple[OneSequence, "Plain"]:
        """Make an empty store, and what it is compared with."""
        placement = Placement(**self.placement, device_tokens=sizes.device_tokens if self.is_split else 0)
        codec = sizes.codec if self.is_quantized else None
        cache = HybridCache(CONFIG, placement, codec=codec, group=group_of_one() if self.is_shared else None)
        if self.copies_late:
            copy_late(cache)
        stores, states = cache._stores, random_states(0, batch=batch, dtype=sizes.dtype)
        stores.shard, stores.capacity = sizes.shard, InitialCapacity(host_tokens=sizes.host_tokens)
        shape = KVShape.of(*states)
        store = stores.place_of(0, shape).make(shape)
        device_tokens = store.split.device_tokens if isinstance(store, SplitStore) else 0
        return store, Plain(store.layout, device_tokens, codec, states)

    def filled(self, num_tokens: int) -> tuple[OneSequence, "Plain"]:
        store, plain = self.make()
        for each in (store, plain):
            each.add(*random_states(num_tokens))
        return store, plain


class Plain:
    """
    The states that a store must hold, in one tensor each, and its borders, moved a block at a time.

    Attributes:
        states: keys and values; a quantized block is what its codes stand for.
        on_host: tokens of a split layer in host memory.
        quantized: packed blocks.
    """

    def __init__(self, layout: Layout, device_tokens: int, codec: KVCodec | None, states: Pair):
        self.layout, self.device_tokens, self.codec, self.states = layout, device_tokens, codec, states
        self.on_host = self.quantized = 0
        fits = device_tokens >= layout.sink_tokens + BLOCK
        self.first = layout.sink_tokens if fits else 0

    @property
    def num_tokens(self) -> int:
        return self.states[0].shape[2]

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.states = torch.cat([self.states[0], keys], 2), torch.cat([self.states[1], values], 2)
        end, sinks, most = self.num_tokens, self.layout.sink_tokens, self.device_tokens
        if most:
            while end - self.on_host > most:
                self.on_host += max(BLOCK, (most - self.first) // 512 * BLOCK)
            end = self.first + self.on_host
        while self.codec and end - sinks - BLOCK * self.quantized >= 2 * BLOCK:
            start = sinks + BLOCK * self.quantized
            for codec, whole in zip((self.codec.keys, self.codec.values), self.states, strict=True):
                block = whole[:, :, start : start + BLOCK]
                codec.decode(codec.encode(block.clone()), block)
            self.quantized += 1

    def truncate(self, num_tokens: int) -> None:
        self.states = self.states[0][:, :, :num_tokens].clone(), self.states[1][:, :, :num_tokens].clone()
        self.on_host = min(self.on_host, max(0, num_tokens - self.first))
        self.quantized = min(self.quantized, max(0, num_tokens - self.layout.sink_tokens) // BLOCK)

    def select(self, indices: torch.Tensor) -> None:
        self.states = self.states[0][indices], self.states[1][indices]

    def sizes(self) -> list[int]:
        """Return the own tokens of each segment, in order."""
        first, end, shard = 0, self.num_tokens, self.layout.shard
        if self.device_tokens:
            first, end = min(self.first, end), min(self.first + self.on_host, end)
        borders = [first, end]
        if self.codec:
            sinks = min(self.layout.sink_tokens, end)
            borders = [first, sinks, sinks + self.quantized * BLOCK, end]
        if self.device_tokens:
            borders = [0, *borders, self.num_tokens]
        return [shard.tokens(after) - shard.tokens(before) for before, after in pairwise(borders)]

    def assert_held_by(self, store: OneSequence) -> None:
        """Check borders, and what is read."""
        shard, count = self.layout.shard, self.num_tokens
        assert store.is_intact
        assert store.num_tokens == count
        assert store.layout.quantized_blocks == self.quantized
        assert [each.num_tokens for each in store.segments()] == self.sizes()
        version, expected = store.version, [shard.part(each, 0) for each in self.states]
        assert all(map(torch.equal, store.read(), expected))
        assert all(map(torch.equal, store.read_copy(), expected))
        assert store.version == version


_COUNTS = st.sampled_from([1, 1, 2, 63, 64, 65, 130, 257]) | st.integers(1, 400)
_MODES = st.sampled_from([nullcontext, torch.no_grad, torch.inference_mode])
_CODECS = st.builds(
    minmax, st.sampled_from([8, 4, (8, 4)]), sink_tokens=st.sampled_from([0, 64, 128, 256]), rotate=st.booleans()
)
_SHARDS = st.integers(2, 4).flatmap(lambda size: st.builds(Shard, st.integers(0, size - 1), st.just(size)))
_SIZES = st.builds(
    Sizes,
    st.sampled_from([128, 129, 192, 300, 700, 1024]),
    _CODECS,
    _SHARDS,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([131_072, 70]),
)


class StoreMachine(RuleBasedStateMachine):
    """Changes a store in any order; a copy and states that were read stay what they were."""

    variant: Variant
    is_divided = False

    @initialize(sizes=_SIZES, count=_COUNTS, mode=_MODES)
    def start(self, sizes: Sizes, count: int, mode: Any) -> None:
        self.sizes = sizes if self.is_divided else sizes._replace(shard=Shard.ALL)
        self.store, self.plain = self.variant.make(self.sizes)
        self.seed, self.twin = 0, self.copied()
        self.held: list[tuple[Pair, list[torch.Tensor]]] = []
        self.add(count, False, mode)

    def copied(self) -> tuple[OneSequence, Plain]:
        return copy.deepcopy(self.store), copy.deepcopy(self.plain)

    def new(self, count: int) -> Pair:
        self.seed += 1
        return random_states(count, self.seed, self.store.shape.batch, self.sizes.dtype)

    @rule(count=_COUNTS, on_device=st.booleans(), mode=_MODES)
    def add(self, count: int, on_device: bool, mode: Any) -> None:
        with mode():
            states, version = self.new(count), self.store.version
            self.store.add(*states, on_device)
        self.plain.add(*states)
        assert self.store.version != version

    @precondition(lambda self: not self.is_divided)
    @rule(count=_COUNTS, mode=_MODES)
    def append(self, count: int, mode: Any) -> None:
        is_first = not self.plain.num_tokens
        with mode():
            states, version = self.new(count), self.store.version
            returned = self.store.append(*states)
        self.plain.add(*states)
        assert all(map(torch.equal, returned, states if is_first else self.plain.states))
        assert self.store.version != version

    @rule(removed=_COUNTS | st.just(100_000))
    def truncate(self, removed: int) -> None:
        left, version = max(0, self.plain.num_tokens - removed), self.store.version
        self.store.truncate(left)
        self.plain.truncate(left)
        assert self.store.version != version

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        sequences = st.integers(0, self.store.shape.batch - 1)
        indices, version = torch.tensor(data.draw(st.lists(sequences, min_size=1, max_size=4))), self.store.version
        self.store.select(indices)
        self.plain.select(indices)
        assert self.store.version != version

    @rule(is_original=st.booleans())
    def copy(self, is_original: bool) -> None:
        self.check_twin()
        self.twin = self.copied()
        if not is_original:
            (self.store, self.plain), self.twin = self.twin, (self.store, self.plain)

    @rule()
    def hold(self) -> None:
        read = self.store.read_copy()
        self.held.append((read, [each.clone() for each in read]))

    @precondition(lambda self: not self.is_divided)
    @rule(count=_COUNTS)
    def go_back(self, count: int) -> None:
        recent = self.store.recent_states()
        self.store.append(*self.new(count))
        self.store.truncate(recent.start)
        if recent.states[0].shape[2]:
            self.store.extend_recent(recent)

    @precondition(lambda self: not self.is_divided)
    @rule(by_rows=st.booleans())
    def take(self, by_rows: bool) -> None:
        """Go on with another store that has the same states, as for a file, or for another device."""
        before = self.store
        other, _ = self.variant.make(self.sizes, before.shape.batch)
        if by_rows:
            runs = {}
            for name, number in before.entries().items():
                runs[name] = other.run_for(name, number)
                runs[name].make_rows(number)
                for empty, rows in zip(runs[name].rows(), before.rows(name), strict=True):
                    empty.copy_(rows)
                start = number // 2 if name == "packed" else number // 2 // BLOCK * BLOCK
                row = start if name == "packed" else start // BLOCK
                for later, rows in zip(before.rows(name, start), before.rows(name), strict=True):
                    assert torch.equal(later, rows[row:])
            other.take([Segment(run, 0, run.num_entries) for run in runs.values()])
        else:
            other.take_from(before)
        assert other.entries() == before.entries()
        self.store = other
        self.plain.on_host = other.middle.num_tokens if isinstance(other, SplitStore) else 0

    @invariant()
    def holds_the_same(self) -> None:
        # Looking would run copies that are late.
        if hasattr(self, "store") and not self.variant.copies_late:
            self.plain.assert_held_by(self.store)

    def check_twin(self) -> None:
        store, plain = self.twin
        plain.assert_held_by(store)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.plain.assert_held_by(self.store)
            self.check_twin()
            assert all(all(map(torch.equal, *pair)) for pair in self.held)


def machine_of(variant: Variant, is_divided: bool = False) -> type[StoreMachine]:
    return type("Machine", (StoreMachine,), {"variant": variant, "is_divided": is_divided})
