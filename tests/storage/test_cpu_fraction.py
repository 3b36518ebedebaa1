"""The CPU fraction moves to where CPU and device end together, and stays there."""

import random

import pytest

from hf_hybrid_cache.storage import CacheStats
from hf_hybrid_cache.storage.cpu_fraction import LEAST_CPU_FRACTION, CpuFraction

TOKENS = 100_000


def watched(
    equilibrium: float, at_first: float = 0.5, layers: int = 20_000, noise: float = 0.0
) -> tuple[CpuFraction, CacheStats]:
    """Adapt a fraction with noise, where the CPU is the last to end above `equilibrium`."""
    stats, draw = CacheStats(), random.Random(0)
    fraction = CpuFraction(at_first, True, stats)
    for _ in range(layers):
        fraction.note(fraction.fraction + draw.gauss(0, noise) > equilibrium, TOKENS)
    return fraction, stats


@pytest.mark.default("pairs")
@pytest.mark.parametrize("noise", [0, 0.02, 0.2])
@pytest.mark.parametrize("at_first", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("equilibrium", [0.05, 0.2, 0.33, 0.5, 0.68, 0.9, 1.0])
def test_after_a_few_moves_cpu_and_device_end_together(equilibrium: float, at_first: float, noise: float):
    fraction, stats = watched(equilibrium, at_first, noise=noise)
    assert abs(fraction.fraction - equilibrium) <= max(1 / 16, noise)
    assert len(stats.decisions) <= 12
    if at_first == 0.5 and noise == 0 and equilibrium < 1:  # the CPU ends slightly last
        assert equilibrium < fraction.fraction <= equilibrium + 1 / 32


def test_cpu_fraction_when_one_side_is_always_last_then_is_at_its_limit():
    assert watched(-1)[0].fraction == LEAST_CPU_FRACTION
    assert watched(2)[0].fraction == 1


def test_cpu_fraction_when_model_decodes_then_moves_soon_and_says_so():
    assert len(watched(0.2, layers=32 * 40)[1].decisions) >= 3
    fraction, stats = watched(0.3, layers=300)
    (decision,) = stats.decisions
    assert decision == (TOKENS, "cpu_decode", 0.25, "the CPU was the last to end in 128 of 128 layers")
    assert fraction.fraction == decision.value


def test_cpu_fraction_when_settled_then_stays_until_context_grows():
    fraction, stats = watched(0.3)
    made = len(stats.decisions)
    for _ in range(10_000):
        fraction.note(False, int(1.24 * TOKENS))
    assert len(stats.decisions) == made
    for _ in range(10_000):
        fraction.note(fraction.fraction > 0.8, int(1.25 * TOKENS))
    assert fraction.fraction == pytest.approx(0.8, abs=1 / 16)


def test_cpu_fraction_when_not_adaptive_then_stays():
    fraction = CpuFraction(0.4, False, CacheStats())
    for _ in range(1000):
        fraction.note(True, TOKENS)
    assert fraction.fraction == 0.4


def test_cpu_fraction_when_no_room_to_stream_then_is_one_until_reset():
    fraction, stats = watched(0.3)
    fraction.give_up_streaming(TOKENS)
    for _ in range(1000):
        fraction.note(True, 10 * TOKENS)
    assert fraction.fraction == 1
    assert stats.decisions[-1] == (TOKENS, "cpu_decode", 1, "the device has no memory for tokens that are streamed")
    fraction.reset()
    assert fraction.fraction == 0.5
