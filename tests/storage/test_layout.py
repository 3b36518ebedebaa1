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
    CodecChoice,
    HostBlocks,
    HostBudget,
    InitialCapacity,
    KVShape,
    Layout,
    Resident,
    Scratch,
    Shard,
    Store,
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


class InHostMemory:
    """Makes runs in host memory."""

    def dense(self, shape: KVShape, layout: Layout) -> HostBlocks:
        return HostBlocks(shape, InitialCapacity(0, 4096), HostBudget(1))

    def packed(self, shape: KVShape) -> HostBlocks:
        return HostBlocks(shape, InitialCapacity(0, 4096), HostBudget(1), packed=True)

    def on_device(self, shape: KVShape) -> Resident:
        return Resident(shape, InitialCapacity(), HostBudget(1))


def store_of(layout: Layout) -> Store:
    choice = ends = None
    if layout.is_quantized:
        choice = CodecChoice(minmax(8, sink_tokens=layout.sink_tokens, rotate=True), Allowance(1))
    if layout.device_tokens:
        ends = Resident(SHAPE, InitialCapacity(0, 1024), HostBudget(1))
    return Store(SHAPE, layout, InHostMemory(), Scratch(CPU), choice, ends)


def assert_kept_by(layout: Layout, store: Store) -> None:
    assert store.is_intact
    assert store.layout == layout
    assert store.sink_tokens == layout.own_sink_tokens
    own = layout.shard.tokens(store.num_tokens)
    assert store.middle_tokens == (layout.host_tokens if layout.device_tokens else own)
    assert store.first_tokens == (min(store.num_tokens, layout.first_tokens) if layout.device_tokens else 0)
    if store.packed is not None:
        assert store.packed.num_entries == layout.own_quantized_blocks


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
    store = store_of(layout)
    for count in history:
        before, num_tokens = layout, max(0, store.num_tokens + count)
        if count > 0:
            states = torch.randn(1, 1, count, 16)
            store.add(states, states)
            layout = layout.after(num_tokens)
            assert (layout.host_tokens, layout.quantized_blocks) == plainly(before, num_tokens)
        else:
            store.truncate(num_tokens)
            layout = layout.cropped(num_tokens)
        assert store.num_tokens == num_tokens
        assert_kept_by(layout, store)


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
    in_middle = after.host_tokens if layout.device_tokens else length
    if layout.is_quantized:
        assert in_middle - after.quantized_blocks * GRANULE < layout.most_full_tokens or not after.host_tokens


@given(layout=LAYOUTS, lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=4).map(sorted), left=st.integers(0))
def test_cropped_by_nothing_it_is_the_same_and_to_nothing_it_starts_anew(layout: Layout, lengths: list[int], left: int):
    after = layout.growing(lengths)[-1]
    assert after.cropped(lengths[-1]) == after
    assert after.cropped(0) == layout
    cropped = after.cropped(min(left, lengths[-1]))
    assert cropped == after.cropped(lengths[-1]).cropped(min(left, lengths[-1]))


@given(layout=ONE_PLACE, start=st.integers(0, 700), count=COUNTS)
def test_quantized_ends_when_many_come_then_are_as_one_by_one(layout: Layout, start: int, count: int):
    for length in (600, start):
        layout = layout.cropped(length).after(length)
    ends = [after.quantized_end for after in layout.growing(range(start + 1, start + count + 1))]
    assert layout.quantized_ends(start, start + count) == ends


@given(layout=LAYOUTS.map(lambda layout: replace(layout, device_tokens=0)), length=st.integers(0, 3000))
def test_parts_of_a_file_have_every_token_once_and_every_block_once(layout: Layout, length: int):
    parts = layout.after(length).parts(length)
    assert sum(entries * (GRANULE if name == "packed" else 1) for name, (entries, _) in parts.items()) == length
    blocks = [block for _, runs in parts.values() for run in runs for block in run]
    assert sorted(blocks) == list(range(-(-length // GRANULE)))


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
