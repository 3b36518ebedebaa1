"""The share of the CPU: that it is moved to where CPU and device end together, and stays there."""

import random

import pytest

from hf_hybrid_cache.storage import CacheStats
from hf_hybrid_cache.storage.cpu_share import LEAST_SHARE, CpuShare

TOKENS = 100_000


def watched(
    balance: float, at_first: float = 0.5, layers: int = 20_000, noise: float = 0.0
) -> tuple[CpuShare, CacheStats]:
    """A share that was moved where the CPU is the last to end with more than `balance`, but for some noise."""
    stats, draw = CacheStats(), random.Random(0)
    share = CpuShare(at_first, True, stats)
    for _ in range(layers):
        share.note(share.share + draw.gauss(0, noise) > balance, TOKENS)
    return share, stats


@pytest.mark.parametrize("noise", [0, 0.02, 0.2])
@pytest.mark.parametrize("at_first", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("balance", [0.05, 0.2, 0.33, 0.5, 0.68, 0.9, 1.0])
def test_after_a_few_moves_cpu_and_device_end_together(balance: float, at_first: float, noise: float):
    share, stats = watched(balance, at_first, noise=noise)
    assert abs(share.share - balance) <= max(1 / 16, noise)
    assert len(stats.decisions) <= 12


@pytest.mark.parametrize("balance", [0.05, 0.2, 0.33, 0.5, 0.68, 0.9])
def test_at_rest_the_cpu_is_the_last_by_a_little(balance: float):
    share, _ = watched(balance)
    assert balance < share.share <= balance + 1 / 32


@pytest.mark.parametrize(("balance", "end"), [(-1, LEAST_SHARE), (2, 1.0)])
def test_where_one_of_them_is_always_the_last_the_other_does_as_much_as_it_can(balance: float, end: float):
    share, _ = watched(balance)
    assert share.share == end


def test_it_is_moved_within_a_few_steps_of_a_model():
    _, stats = watched(0.2, layers=32 * 40)
    assert len(stats.decisions) >= 3


def test_at_rest_it_stays_until_the_context_is_a_quarter_longer():
    share, stats = watched(0.3)
    made = len(stats.decisions)
    for _ in range(10_000):
        share.note(False, int(1.24 * TOKENS))
    assert len(stats.decisions) == made
    for _ in range(10_000):
        share.note(share.share > 0.8, int(1.25 * TOKENS))
    assert share.share == pytest.approx(0.8, abs=1 / 16)


def test_each_move_says_when_where_to_and_why():
    share, stats = watched(0.3, layers=300)
    (decision,) = stats.decisions
    assert decision == (TOKENS, "cpu_decode", 0.25, "the CPU was the last to end in 128 of 128 layers")
    assert share.share == decision.value


def test_a_share_that_does_not_adapt_stays():
    share = CpuShare(0.4, False, CacheStats())
    for _ in range(1000):
        share.note(True, TOKENS)
    assert share.share == 0.4


def test_without_memory_for_what_is_streamed_the_cpu_attends_to_all_until_the_cache_is_empty():
    share, stats = watched(0.3)
    share.give_up_streaming(TOKENS)
    for _ in range(1000):
        share.note(True, 10 * TOKENS)
    assert share.share == 1
    assert stats.decisions[-1] == (TOKENS, "cpu_decode", 1, "the device has no memory for tokens that are streamed")
    share.reset()
    assert share.share == 0.5


@pytest.mark.parametrize("share", [0.01, 0.3, 0.999])
@pytest.mark.parametrize("blocks", [0, 1, 63, 1000])
def test_the_share_is_of_whole_blocks(share: float, blocks: int):
    taken = CpuShare(share, False, CacheStats()).blocks(blocks)
    assert isinstance(taken, int)
    assert taken <= share * blocks < taken + 1
