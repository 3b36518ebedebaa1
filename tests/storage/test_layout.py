"""Borders between the tokens of a layer, and shards of a sequence. That stores keep to them tells `test_stores.py`."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from hf_hybrid_cache.storage import GRANULE, Layout, Shard, Split

SHARDS = st.integers(1, 4).flatmap(lambda size: st.builds(Shard, st.integers(0, size - 1), st.just(size)))
LAYOUTS = st.builds(Layout, st.sampled_from([0, 64, 128, 256]), is_quantized=st.booleans(), shard=SHARDS)
LENGTHS = st.integers(0, 3000) | st.sampled_from([0, 63, 64, 65, 128, 640])


@given(layout=LAYOUTS, length=LENGTHS)
def test_parts_of_a_file_have_every_token_once_and_every_block_once(layout: Layout, length: int):
    parts = layout.after(length).parts(length)
    assert sum(entries * (GRANULE if name == "packed" else 1) for name, (entries, _) in parts.items()) == length
    blocks = [block for _, runs in parts.values() for run in runs for block in run]
    assert sorted(blocks) == list(range(-(-length // GRANULE)))


@pytest.mark.parametrize(
    ("num_tokens", "quantized_blocks", "host_tokens"),
    [(192, 0, 0), (193, 0, 64), (257, 1, 128), (321, 2, 192), (500, 4, 320)],
)
def test_the_examples_of_their_documentation(num_tokens: int, quantized_blocks: int, host_tokens: int):
    split = Split(device_tokens=192, sink_tokens=64)
    assert split.host_tokens(num_tokens) == host_tokens
    layout = Layout(64, is_quantized=True, first_tokens=split.first_tokens)
    assert layout.after(host_tokens).quantized_blocks == quantized_blocks
    assert Layout(64, is_quantized=True).after(300).quantized_blocks == 2


@given(size=st.integers(1, 7), start=LENGTHS, count=LENGTHS)
def test_every_token_is_kept_by_one_process_with_its_states(size: int, start: int, count: int):
    end, kept = start + count, []
    states = torch.arange(start, end).view(1, 1, count, 1)
    for shard in (Shard(rank, size) for rank in range(size)):
        positions = shard.positions(start, end).tolist()
        assert shard.tokens(end) - shard.tokens(start) == len(positions)
        part = shard.part(states, start)
        assert part.shape[:2] == (1, 1)
        assert part.flatten().tolist() == positions
        kept += positions
    assert sorted(kept) == list(range(start, end))


@given(size=st.integers(1, 7), length=LENGTHS)
def test_a_new_block_goes_to_a_process_that_has_the_least(size: int, length: int):
    shards, length = [Shard(rank, size) for rank in range(size)], length // GRANULE * GRANULE
    held = [shard.tokens(length) for shard in shards]
    assert max(held) - min(held) <= GRANULE
    assert sum(shard.blocks(length // GRANULE) for shard in shards) == length // GRANULE
    (taker,) = (shard.rank for shard in shards if shard.tokens(length + 1) > held[shard.rank])
    assert held[taker] == min(held)
