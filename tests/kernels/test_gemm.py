"""Products of quantized weights with many tokens, as integers: against float64 up to rounding."""

import numpy as np
import pytest

from hf_hybrid_cache.kernels import PanelLayout, has_gemm, multiply_many
from kernels import test_panels
from kernels.test_panels import quantized, random_weight, taken_apart

pytestmark = pytest.mark.skipif(not has_gemm(), reason="the processor does not add up four products of 8 bits")
CHUNK = 32


def product(tokens: np.ndarray, panels: np.ndarray, layout: PanelLayout, bias: np.ndarray | None = None) -> np.ndarray:
    return test_panels.product(tokens, panels, layout, bias, multiply_many)


def rounding(tokens: np.ndarray) -> np.ndarray:
    """Return the largest rounding error of each number of `tokens`, `[tokens, columns]`."""
    columns = tokens.shape[1]
    filled = np.zeros((len(tokens), -(-columns // CHUNK) * CHUNK))
    filled[:, :columns] = tokens
    chunks = filled.reshape(len(tokens), -1, CHUNK)
    steps = np.maximum(np.ptp(chunks, 2) / 254, np.abs(chunks).max(2) / 2**15)
    return 0.501 * np.repeat(steps, CHUNK, 1)[:, :columns]


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (17, 33), (48, 64), (50, 100), (130, 200), (70, 1025)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 6, 7, 12, 65])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("mean", [0.0, 3.0, -1000.0])
def test_products_are_off_by_the_rounding_of_tokens_alone(shape, num_tokens, bits, group, has_bias, mean):
    layout = PanelLayout(bits, *shape, group)
    panels = quantized(random_weight(*shape)[0], layout)
    numbers, _ = taken_apart(panels, layout)
    generator = np.random.default_rng(1)
    tokens = (mean + generator.standard_normal((num_tokens, layout.columns))).astype(np.float32)
    bias = generator.standard_normal(layout.rows).astype(np.float32) * has_bias
    exact = tokens.astype(np.float64) @ numbers.T + bias
    out = product(tokens, panels, layout, bias if has_bias else None)
    sizes = np.abs(tokens) @ np.abs(numbers).T
    assert (np.abs(out - exact) <= rounding(tokens) @ np.abs(numbers).T + 1e-5 * sizes + 1e-5).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_tokens_that_are_multiples_of_their_step_are_multiplied_exactly(bits):
    layout = PanelLayout(bits, 40, 96, 32)
    panels = quantized(random_weight(40, 96)[0], layout)
    numbers, _ = taken_apart(panels, layout)
    generator = np.random.default_rng(2)
    tokens = generator.integers(0, 255, (9, 3, CHUNK))
    tokens[:, :, :2] = 0, 254
    tokens = (tokens.reshape(9, -1) - 100.0).astype(np.float32)
    exact = tokens.astype(np.float64) @ numbers.T
    assert np.abs(product(tokens, panels, layout) - exact).max() <= 1e-5 * (np.abs(tokens) @ np.abs(numbers).T).max()


def test_products_when_in_bfloat16_then_are_rounded_to_nearest():
    test_panels.check_products_of_bfloat16(70, multiply_many)


def test_products_do_not_depend_on_threads_or_on_what_else_is_multiplied():
    test_panels.check_products_alone(multiply_many)


def test_products_of_several_blocks_of_tokens_are_those_of_each_block():
    layout = PanelLayout(4, 40, 8192, 128)
    panels = quantized(random_weight(40, 8192)[0], layout)
    tokens = random_weight(400, 8192, seed=1)[0]
    alone = [product(tokens[first : first + 50], panels, layout) for first in range(0, 400, 50)]
    assert (product(tokens, panels, layout) == np.concatenate(alone)).all()


@pytest.mark.parametrize("outlier", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("bits", [8, 4])
def test_an_outlier_costs_the_numbers_of_other_chunks_and_tokens_nothing(outlier, bits):
    layout = PanelLayout(bits, 32, 256, 128)
    panels = quantized(random_weight(32, 256)[0], layout)
    # The tokens are small.
    tokens = random_weight(7, 256, seed=1)[0]
    expected = product(tokens, panels, layout)
    far = tokens.copy()
    far[0, 5] = outlier
    assert (product(far, panels, layout)[1:] == expected[1:]).all()
    numbers, _ = taken_apart(panels, layout)
    exact = far.astype(np.float64) @ numbers.T
    assert (np.abs(product(far, panels, layout) - exact) <= rounding(far) @ np.abs(numbers).T + 1e-5 * outlier).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_tokens_that_are_not_finite_give_outputs_that_are_not(value):
    test_panels.check_not_finite(value, 8, multiply_many)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-20, 1e30])
def test_tokens_of_any_size_are_kept(size):
    layout = PanelLayout(8, 20, 64, 32)
    panels = quantized(random_weight(20, 64)[0], layout)
    numbers, _ = taken_apart(panels, layout)
    tokens = (random_weight(6, 64, seed=1)[0].astype(np.float64) * size).astype(np.float32)
    tokens[1] = size
    exact = tokens.astype(np.float64) @ numbers.T
    out = product(tokens, panels, layout)
    # The last term is so small that no model computes with it.
    assert (np.abs(out - exact) <= rounding(tokens) @ np.abs(numbers).T + 1e-5 * np.abs(exact) + 1e-27).all()
