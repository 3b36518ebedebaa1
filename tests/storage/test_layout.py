"""Borders between the tokens of a layer: stores keep their tokens where the layout says, whatever happened before."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from hf_hybrid_cache import minmax
from hf_hybrid_cache.storage import (
    GRANULE,
    Allowance,
    CacheStats,
    CodecChoice,
    HostBudget,
    HostStore,
    InitialCapacity,
    KVShape,
    Layout,
    QuantizedShard,
    QuantizedStore,
    ResidentStore,
    Scratch,
    Shard,
    SplitStore,
)

CPU = torch.device("cpu")
SHAPE = KVShape(1, 1, 16, 16, torch.float32, torch.float32, CPU)

SINKS = st.sampled_from([0, 64, 128, 256])
SHARDS = st.integers(1, 4).flatmap(lambda size: st.builds(Shard, st.integers(0, size - 1), st.just(size)))
DEVICE_TOKENS = st.sampled_from([128, 129, 192, 300, 700, 1024])
ONE_PLACE = st.builds(Layout, SINKS, is_quantized=st.booleans(), shard=SHARDS)
SPLIT = st.builds(Layout, is_quantized=st.booleans(), device_tokens=DEVICE_TOKENS)
SPLIT_QUANTIZED = st.builds(Layout, SINKS, is_quantized=st.just(True), device_tokens=DEVICE_TOKENS)
LAYOUTS = st.one_of(ONE_PLACE, SPLIT, SPLIT_QUANTIZED)
COUNTS = st.sampled_from([1, 2, 63, 64, 65, 130, 257]) | st.integers(1, 600)
# Tokens that come, or, where the number is negative, that are removed; more than there are is a reset.
HISTORIES = st.lists(st.one_of(COUNTS, COUNTS, COUNTS.map(lambda count: -count), st.just(-10_000)), max_size=12)


def in_host_memory(shape: KVShape = SHAPE, packed: bool = False) -> HostStore:
    return HostStore(shape, InitialCapacity(0, 4096), HostBudget(1), packed)


def packed_in_host_memory(shape: KVShape) -> HostStore:
    return in_host_memory(shape, packed=True)


class Stored:
    """
    A store that is kept by a layout, and what is where in it.

    Attributes:
        num_tokens: of the sequence.
    """

    def __init__(self, layout: Layout):
        self.num_tokens = 0
        codec = minmax(8, sink_tokens=layout.sink_tokens, rotate=True)
        arguments = SHAPE, CodecChoice(codec, Allowance(1)), in_host_memory(), packed_in_host_memory, Scratch(CPU)
        self.whole: HostStore | QuantizedStore | SplitStore
        if not layout.is_quantized:
            self.whole = in_host_memory()
            self.whole.layout = layout
        elif layout.device_tokens:
            self.whole = QuantizedStore(*arguments, layout.middle)
        else:
            self.whole = QuantizedShard(*arguments, layout)
        self.middle = self.whole
        if layout.device_tokens:
            device = ResidentStore(SHAPE, InitialCapacity(0, 1024), HostBudget(1))
            self.whole = SplitStore(SHAPE, device, self.middle, layout, Scratch(CPU), CacheStats())

    def change(self, count: int) -> None:
        """Add so many tokens, or remove them."""
        self.num_tokens = max(0, self.num_tokens + count)
        states = torch.randn(1, 1, max(0, count), 16)
        if isinstance(self.whole, HostStore | QuantizedShard):
            if count > 0:
                self.whole.extend_to(self.num_tokens, states, states)
            else:
                self.whole.truncate_to(self.num_tokens)
        elif count > 0:
            self.whole.extend(states, states)
        else:
            self.whole.truncate(self.num_tokens)

    def assert_kept_by(self, layout: Layout) -> None:
        assert self.whole.is_intact
        assert self.whole.layout == layout
        assert self.whole.num_tokens == layout.shard.tokens(self.num_tokens)
        if isinstance(self.whole, SplitStore):
            assert self.middle.num_tokens == layout.host_tokens
            assert self.whole.first_tokens == min(self.num_tokens, layout.first_tokens)
        if isinstance(self.middle, QuantizedStore):
            assert self.middle.packed.num_tokens == layout.own_quantized_blocks
            of_middle = layout.middle if layout.device_tokens else layout
            assert self.middle.sink_tokens == of_middle.own_sink_tokens


def plainly(layout: Layout, num_tokens: int) -> tuple[int, int]:
    """Tokens in host memory and quantized blocks, counted up from those of before."""
    on_host, quantized, end = layout.host_tokens, layout.quantized_blocks, num_tokens
    if layout.device_tokens:
        first = layout.sink_tokens if layout.device_tokens >= layout.sink_tokens + 64 else 0
        while num_tokens - on_host > layout.device_tokens:
            on_host += max(64, (layout.device_tokens - first) // 512 * 64)
        end = first + on_host
    while layout.is_quantized and end - layout.sink_tokens - 64 * quantized >= 128:
        quantized += 1
    return on_host, quantized


@given(layout=LAYOUTS, history=HISTORIES)
def test_stores_keep_their_tokens_where_the_layout_says(layout: Layout, history: list[int]):
    stored = Stored(layout)
    for count in history:
        stored.change(count)
        before, layout = layout, layout.after(stored.num_tokens) if count > 0 else layout.cropped(stored.num_tokens)
        if count > 0:
            assert (layout.host_tokens, layout.quantized_blocks) == plainly(before, stored.num_tokens)
        stored.assert_kept_by(layout)


@given(layout=LAYOUTS, lengths=st.lists(st.integers(0, 3000), max_size=6).map(sorted))
def test_borders_move_forward_only_and_in_whole_blocks(layout: Layout, lengths: list[int]):
    before = layout
    for length, after in zip(lengths, layout.growing(lengths), strict=True):
        assert after.host_tokens >= before.host_tokens
        assert after.quantized_blocks >= before.quantized_blocks
        assert after.host_tokens % GRANULE == 0
        assert after.after(length) is after
        before = after


@given(layout=LAYOUTS, length=st.integers(0, 3000))
def test_tokens_that_are_not_quantized_or_on_the_device_are_few(layout: Layout, length: int):
    after = layout.after(length)
    if layout.device_tokens:
        assert length - after.host_tokens <= layout.device_tokens
    in_one_place = after.first_tokens + after.host_tokens if layout.device_tokens else length
    if layout.is_quantized:
        assert in_one_place - after.quantized_blocks * GRANULE < layout.most_full_tokens or not after.host_tokens


@given(layout=LAYOUTS, lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=4).map(sorted), left=st.integers(0))
def test_cropped_by_nothing_it_is_the_same_and_to_nothing_it_starts_anew(layout: Layout, lengths: list[int], left: int):
    after = layout.growing(lengths)[-1]
    assert after.cropped(lengths[-1]) == after
    assert after.cropped(0) == layout
    cropped = after.cropped(min(left, lengths[-1]))
    assert cropped == after.cropped(lengths[-1]).cropped(min(left, lengths[-1]))


@given(layout=LAYOUTS.map(lambda layout: replace(layout, device_tokens=0)), length=st.integers(0, 3000))
def test_parts_of_a_file_have_every_token_once_and_every_block_once(layout: Layout, length: int):
    parts = layout.after(length).parts(length)
    assert sum(entries * (GRANULE if name == "packed" else 1) for name, (entries, _) in parts.items()) == length
    blocks = [block for _, runs in parts.values() for run in runs for block in run]
    assert sorted(blocks) == list(range(-(-length // GRANULE)))
    assert set(layout.after(length).indexed_blocks(length)) <= set(blocks)


@given(sizes=st.integers(1, 5), sinks=SINKS, length=st.integers(0, 3000))
def test_every_quantized_block_is_kept_by_one_process(sizes: int, sinks: int, length: int):
    layouts = [Layout(sinks, is_quantized=True, shard=Shard(rank, sizes)).after(length) for rank in range(sizes)]
    assert len({layout.quantized_blocks for layout in layouts}) == 1
    assert sum(layout.own_quantized_blocks for layout in layouts) == layouts[0].quantized_blocks
    assert sum(layout.own_sink_tokens for layout in layouts) == sinks


@pytest.mark.parametrize(
    ("num_tokens", "quantized_blocks", "host_tokens"),
    [(192, 0, 0), (193, 0, 64), (257, 1, 128), (321, 2, 192), (500, 4, 320)],
)
def test_the_example_of_its_documentation(num_tokens: int, quantized_blocks: int, host_tokens: int):
    layout = Layout(64, is_quantized=True, device_tokens=192).after(num_tokens)
    assert (layout.quantized_blocks, layout.host_tokens) == (quantized_blocks, host_tokens)
