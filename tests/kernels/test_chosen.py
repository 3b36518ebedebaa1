"""Products of tokens with the weights that they have chosen, against float64."""

from collections.abc import Callable

import numpy as np
import pytest

from hf_hybrid_cache.kernels import (
    PanelLayout,
    Products,
    factor_of,
    get_num_threads,
    quantize_panels,
    set_num_threads,
)
from kernels.reference import stored
from kernels.test_panels import taken_apart

SHAPES = [(1, 1), (16, 32), (17, 33), (50, 100), (130, 200), (40, 2048), (1100, 70)]
COUNT = 6
Multiply = Callable[..., int]


def random_numbers(*shape: int, storage: str = "float32", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random numbers as kernels read them, and in float64."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return stored(numbers, storage)


def choices(num_tokens: int, of_token: int, seed: int = 1) -> np.ndarray:
    """Choose different matrices for each token; the last choice of the last token is none."""
    generator = np.random.default_rng(seed)
    chosen = np.array([generator.permutation(COUNT)[:of_token] for _ in range(num_tokens)])
    chosen[-1, -1] = COUNT
    return chosen


def expected(tokens: np.ndarray, weights: np.ndarray, chosen: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """`[pairs, rows]` in float64."""
    flat, out = chosen.ravel(), []
    for pair, index in enumerate(flat):
        if index == COUNT:
            out.append(np.zeros(weights.shape[1]))
        else:
            token = tokens[pair * len(tokens) // len(flat)]
            out.append(weights[index] @ token + (0 if bias is None else bias[index]))
    return np.array(out)


def run(multiply: Multiply, tokens: np.ndarray, chosen: np.ndarray, bias: np.ndarray | None, rows: int) -> np.ndarray:
    out = np.full((chosen.size, rows), 7, tokens.dtype)
    chosen = np.ascontiguousarray(chosen, np.int64)
    bias_at = 0 if bias is None else bias.ctypes.data
    given = tokens.ctypes.data, chosen.size, tokens.dtype == np.uint16, bias_at, out.ctypes.data
    wrong = multiply(0, *given, chosen.ctypes.data, chosen.size // len(tokens))
    assert wrong == 0
    return out


def as_float(out: np.ndarray) -> np.ndarray:
    return (out.astype(np.uint32) << 16).view(np.float32) if out.dtype == np.uint16 else out


def of_rows(weights: np.ndarray) -> Multiply:
    return Products.of_numbers(weights.ctypes.data, *weights.shape, weights.dtype == np.uint16).multiply


def of_columns(weights: np.ndarray) -> Multiply:
    """Return a product with weights that have columns before rows in memory."""
    stored = np.ascontiguousarray(weights.transpose(0, 2, 1))
    is_bfloat16 = weights.dtype == np.uint16
    return lambda *given: Products.of_numbers(
        stored.ctypes.data, *weights.shape, is_bfloat16, is_transposed=True
    ).multiply(*given)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "of_token"), [(1, 1), (1, 4), (2, 3), (9, 2), (40, 6)])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("has_own", [False, True], ids=["", "own"])
@pytest.mark.parametrize("of", [of_rows, of_columns])
def test_products_with_chosen_weights_are_those_in_float64(of, shape, num_tokens, of_token, storage, has_bias, has_own):
    weights, exact_weights = random_numbers(COUNT, *shape, storage=storage)
    chosen = choices(num_tokens, of_token)
    tokens, exact_tokens = random_numbers(num_tokens * (of_token if has_own else 1), shape[1], storage=storage, seed=2)
    bias, exact_bias = random_numbers(COUNT, shape[0], storage=storage, seed=3) if has_bias else (None, None)
    out = as_float(run(of(weights), tokens, chosen, bias, shape[0]))
    exact = expected(exact_tokens, exact_weights, chosen, exact_bias)
    of_all = np.abs(exact_weights).sum(2).max() * np.abs(exact_tokens).max()
    rounding = 2.0**-8 * np.abs(exact) if storage == "bfloat16" else 0
    assert (np.abs(out - exact) <= 1e-6 * of_all + rounding).all()


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "of_token"), [(1, 4), (9, 2), (40, 6)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_products_with_chosen_panels_are_those_with_the_decoded_weights(shape, num_tokens, of_token, bits, has_bias):
    layout = PanelLayout(bits, *shape, 32)
    panels = np.empty((COUNT, layout.num_bytes), np.uint8)
    factors = [factor_of(4.0 * 2.0**index) for index in range(COUNT)]
    given, _ = random_numbers(COUNT, *shape)
    for index, factor in enumerate(factors):
        quantize_panels(given[index] * 2.0**index, layout, factor, panels[index])
    weights = np.array([taken_apart(panels[index], layout, factors[index])[0] for index in range(COUNT)])
    chosen = choices(num_tokens, of_token)
    tokens, exact_tokens = random_numbers(num_tokens, shape[1], seed=2)
    bias, exact_bias = random_numbers(COUNT, shape[0], seed=3) if has_bias else (None, None)
    products = Products.of_panels(panels.ctypes.data, layout, factors)
    out = run(products.multiply, tokens, chosen, bias, shape[0])
    exact = expected(exact_tokens, weights, chosen, exact_bias)
    # Tokens are rounded to 16 bits of the largest in their group.
    of_all = np.abs(weights).sum(2).max() * np.abs(tokens).max()
    assert (np.abs(out - exact) <= of_all / 65278 + 1e-5 * np.abs(exact) + 1e-5).all()


def test_products_do_not_depend_on_threads_or_on_what_others_choose():
    weights, _ = random_numbers(COUNT, 300, 256, storage="bfloat16")
    tokens, _ = random_numbers(13, 256, storage="bfloat16", seed=1)
    chosen = choices(13, 3)
    together = run(of_rows(weights), tokens, chosen, None, 300).reshape(13, 3, 300)
    most = get_num_threads()
    for threads in range(1, most + 1):
        set_num_threads(threads)
        try:
            alone = [run(of_rows(weights), tokens[i : i + 1], chosen[i : i + 1], None, 300) for i in range(13)]
        finally:
            set_num_threads(None)
        assert (np.array(alone) == together).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_a_weight_reaches_only_those_who_chose_it(value):
    weights, _ = random_numbers(COUNT, 20, 70)
    weights[2, 5, 69] = value
    tokens, _ = random_numbers(2, 70, seed=1)
    out = run(of_rows(weights), tokens, np.array([[1, 2], [3, 4]]), None, 20)
    assert not np.isfinite(out[1, 5])
    assert np.isfinite(np.delete(out, 1, 0)).all()
    assert np.isfinite(np.delete(out[1], 5)).all()


@pytest.mark.parametrize("index", [-1, COUNT + 1, 2**40])
def test_indices_of_no_weight_are_counted(index):
    weights, _ = random_numbers(COUNT, 20, 64)
    tokens, _ = random_numbers(2, 64, seed=1)
    chosen = np.array([[0, index], [index, 1]], np.int64)
    out = np.full((4, 20), 7, np.float32)
    given = tokens.ctypes.data, 4, False, 0, out.ctypes.data, chosen.ctypes.data, 2
    assert of_rows(weights)(0, *given) == 2
    assert (out[1:3] == 0).all()
    assert (out[[0, 3]] != 7).all()
