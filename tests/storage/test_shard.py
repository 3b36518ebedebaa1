"""Shards of a sequence: every token is kept once, wherever it is cut off."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from hf_hybrid_cache.storage import GRANULE, Shard

SIZES = st.integers(1, 7)
LENGTHS = st.integers(0, 2000) | st.sampled_from([0, 63, 64, 65, 128, 640])


@given(size=SIZES, start=LENGTHS, count=LENGTHS)
def test_every_token_is_kept_by_one_process(size: int, start: int, count: int):
    positions = torch.cat([Shard(rank, size).positions(start, start + count) for rank in range(size)])
    assert sorted(positions.tolist()) == list(range(start, start + count))


@given(size=SIZES, length=LENGTHS)
def test_shards_when_of_any_length_then_differ_by_at_most_a_block(size: int, length: int):
    shards = [Shard(rank, size) for rank in range(size)]
    tokens = [shard.tokens(length) for shard in shards]
    assert tokens == [len(shard.positions(0, length)) for shard in shards]
    assert max(tokens) - min(tokens) <= GRANULE
    assert sum(shard.blocks(length // GRANULE) for shard in shards) == length // GRANULE


@given(size=SIZES, start=LENGTHS, count=LENGTHS)
def test_the_part_of_new_states_is_that_of_the_own_positions(size: int, start: int, count: int):
    states = torch.arange(start, start + count).view(1, 1, count, 1)
    for rank in range(size):
        shard = Shard(rank, size)
        part = shard.part(states, start)
        assert part.shape[:2] == (1, 1)
        assert part.flatten().tolist() == shard.positions(start, start + count).tolist()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_new_block_goes_to_a_process_that_has_the_least(size: int):
    for length in range(0, 20 * GRANULE, GRANULE):
        held = [Shard(rank, size).tokens(length) for rank in range(size)]
        (taker,) = (rank for rank in range(size) if Shard(rank, size).tokens(length + 1) > held[rank])
        assert held[taker] == min(held)
