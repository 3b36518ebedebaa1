"""Borders between the tokens of a layer, and shards of a sequence. That stores keep to them tells `test_stores.py`."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from hf_hybrid_cache.storage import GRANULE, Shard

LENGTHS = st.integers(0, 3000) | st.sampled_from([0, 63, 64, 65, 128, 640])


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
