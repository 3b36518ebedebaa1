"""The fraction of the CPU: that it is moved to where CPU and device end together, and stays there."""

import random

import pytest

from hf_hybrid_cache.storage import CacheStats
from hf_hybrid_cache.storage.cpu_fraction import LEAST_CPU_FRACTION, CpuFraction

TOKENS = 100_000


def watched(
    equilibrium: float, at_first: float = 0.5, layers: int = 20_000, noise: float = 0.0
) -> tuple[CpuFraction, CacheStats]:
    """A fraction that was moved where the CPU is the last to end with more than `equilibrium`, but for some noise."""
    stats, draw = CacheStats(), random.Random(0)
    fraction = CpuFraction(at_first, True, stats)
    for _ in range(layers):
        fraction.note(fraction.fraction + draw.gauss(0, noise) > equilibrium, TOKENS)
    return fraction, stats


@pytest.mark.parametrize("noise", [0, 0.02, 0.2])
@pytest.mark.parametrize("at_first", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("equilibrium", [0.05, 0.2, 0.33, 0.5, 0.68, 0.9, 1.0])
def test_after_a_few_moves_cpu_and_device_end_together(equilibrium: float, at_first: float, noise: float):
    fraction, stats = watched(equilibrium, at_first, noise=noise)
    assert abs(fraction.fraction - equilibrium) <= max(1 / 16, noise)
    assert len(stats.decisions) <= 12


@pytest.mark.parametrize("equilibrium", [0.05, 0.2, 0.33, 0.5, 0.68, 0.9])
def test_at_rest_the_cpu_is_the_last_by_a_little(equilibrium: float):
    fraction, _ = watched(equilibrium)
    assert equilibrium < fraction.fraction <= equilibrium + 1 / 32


@pytest.mark.parametrize(("equilibrium", "end"), [(-1, LEAST_CPU_FRACTION), (2, 1.0)])
def test_where_one_of_them_is_always_the_last_the_other_does_as_much_as_it_can(equilibrium: float, end: float):
    fraction, _ = watched(equilibrium)
    assert fraction.fraction == end


def test_it_is_moved_within_a_few_steps_of_a_model():
    _, stats = watched(0.2, layers=32 * 40)
    assert len(stats.decisions) >= 3


def test_at_rest_it_stays_until_the_context_is_a_quarter_longer():
    fraction, stats = watched(0.3)
    made = len(stats.decisions)
    for _ in range(10_000):
        fraction.note(False, int(1.24 * TOKENS))
    assert len(stats.decisions) == made
    for _ in range(10_000):
        fraction.note(fraction.fraction > 0.8, int(1.25 * TOKENS))
    assert fraction.fraction == pytest.approx(0.8, abs=1 / 16)


def test_each_move_says_when_where_to_and_why():
    fraction, stats = watched(0.3, layers=300)
    (decision,) = stats.decisions
    assert decision == (TOKENS, "cpu_decode", 0.25, "the CPU was the last to end in 128 of 128 layers")
    assert fraction.fraction == decision.value


def test_a_share_that_does_not_adapt_stays():
    fraction = CpuFraction(0.4, False, CacheStats())
    for _ in range(1000):
        fraction.note(True, TOKENS)
    assert fraction.fraction == 0.4


def test_without_memory_for_what_is_streamed_the_cpu_attends_to_all_until_the_cache_is_empty():
    fraction, stats = watched(0.3)
    fraction.give_up_streaming(TOKENS)
    for _ in range(1000):
        fraction.note(True, 10 * TOKENS)
    assert fraction.fraction == 1
    assert stats.decisions[-1] == (TOKENS, "cpu_decode", 1, "the device has no memory for tokens that are streamed")
    fraction.reset()
    assert fraction.fraction == 0.5


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.999])
@pytest.mark.parametrize("blocks", [0, 1, 63, 1000])
def test_the_share_is_of_whole_blocks(fraction: float, blocks: int):
    taken = CpuFraction(fraction, False, CacheStats()).blocks(blocks)
    assert isinstance(taken, int)
    assert taken <= fraction * blocks < taken + 1
