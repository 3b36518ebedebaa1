"""Products of tokens with weights, quantized or not, also with those that each token has chosen, against float64."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from hf_hybrid_cache.kernels import (
    PanelLayout,
    Products,
    factor_of,
    get_num_threads,
    has_gemm,
    multiply_many,
    set_num_threads,
)
from kernels.test_panels import FACTOR, GROUPS, SHAPES, quantized, random_numbers, taken_apart

COUNT, CHUNK = 6, 32
needs_gemm = pytest.mark.skipif(not has_gemm(), reason="the processor does not add up four products of 8 bits")
MANY = pytest.param("many", marks=needs_gemm)
# The kernel of few tokens rounds them to 16 bits, that of many tokens to 8.
WAYS: dict[str, Callable[..., object]] = {"few": Products.multiply, "many": multiply_many}
EVERY_WAY = pytest.mark.parametrize("way", ["few", MANY])


class Weights(NamedTuple):
    """Several weights as kernels read them, in float64, and what must be kept meanwhile."""

    products: Products
    exact: np.ndarray
    kept: np.ndarray


@cache
def weights(kind: str, rows: int, columns: int, storage: str = "float32", seed: int = 0) -> Weights:
    """Random weights as "rows", "columns" (which come before rows in memory), or in "8" or "4" bits."""
    given, exact = random_numbers(COUNT, rows, columns, storage=storage, seed=seed)
    if kind in ("rows", "columns"):
        kept = given if kind == "rows" else np.ascontiguousarray(given.transpose(0, 2, 1))
        sizes = COUNT, rows, columns, storage == "bfloat16", kind == "columns"
        return Weights(Products.of_numbers(kept.ctypes.data, *sizes), exact, kept)
    layout = PanelLayout(int(kind), rows, columns, CHUNK)
    factors = [factor_of(4.0 * 2.0**index) for index in range(COUNT)]
    given = random_numbers(COUNT, rows, columns, seed=seed)[0]
    scaled = zip(given, factors, strict=True)
    kept = np.array([quantized(each * np.float32(2.0**i), layout, of) for i, (each, of) in enumerate(scaled)])
    exact = np.array([taken_apart(panels, layout, of)[0] for panels, of in zip(kept, factors, strict=True)])
    return Weights(Products.of_panels(kept.ctypes.data, layout, factors), exact, kept)


def one(layout: PanelLayout, weight: np.ndarray | None = None) -> tuple[Callable[..., np.ndarray], np.ndarray]:
    """Quantize one weight; return its product in a way, and the dequantized numbers."""
    panels = quantized(random_numbers(layout.rows, layout.columns)[0] if weight is None else weight, layout)
    products = Products.of_panels(panels.ctypes.data, layout, [FACTOR])

    def product(way: str, tokens: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        assert panels.size  # kept as long as this function
        return run(products, tokens, layout.rows, bias, multiply=WAYS[way])

    return product, taken_apart(panels, layout)[0]


def run(
    products: Products,
    tokens: np.ndarray,
    rows: int,
    bias: np.ndarray | None = None,
    chosen: np.ndarray | None = None,
    multiply: Callable[..., object] = Products.multiply,
    wrong: int = 0,
) -> np.ndarray:
    pairs = len(tokens) if chosen is None else chosen.size
    out = np.full((pairs, rows), 7, tokens.dtype)
    bias_at = 0 if bias is None else bias.ctypes.data
    given = [tokens.ctypes.data, pairs, tokens.dtype == np.uint16, bias_at, out.ctypes.data]
    if chosen is not None:
        chosen = np.ascontiguousarray(chosen, np.int64)
        given += [chosen.ctypes.data, pairs // len(tokens)]
    found = multiply(products, 0, *given)
    assert chosen is None or found == wrong
    return out


def as_float(out: np.ndarray) -> np.ndarray:
    return (out.astype(np.uint32) << 16).view(np.float32) if out.dtype == np.uint16 else out


def every_number_of_threads() -> Iterator[int]:
    for threads in range(1, get_num_threads() + 1):
        set_num_threads(threads)
        try:
            yield threads
        finally:
            set_num_threads(None)


def rounding(tokens: np.ndarray, way: str, group: int = CHUNK) -> np.ndarray:
    """Return the largest rounding error of each number of `tokens`, `[tokens, columns]`."""
    size, columns = CHUNK if way == "many" else group, tokens.shape[1]
    filled = np.zeros((len(tokens), -(-columns // size) * size))
    filled[:, :columns] = tokens
    chunks = filled.reshape(len(tokens), -1, size)
    largest = np.abs(chunks).max(2)
    steps = largest / 65278
    if way == "many":
        steps = 0.501 * np.maximum(np.ptp(chunks, 2) / 254, largest / 2**15)
    return np.repeat(steps, size, 1)[:, :columns]


@pytest.mark.covering(2)
@EVERY_WAY
@pytest.mark.parametrize("shape", [*SHAPES, (70, 1025)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 6, 7, 8, 9, 12, 21, 65])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("mean", [0.0, 3.0, -1000.0])
def test_products_are_those_with_the_decoded_weights(way, shape, num_tokens, bits, group, has_bias, mean):
    """They are off by the rounding of tokens alone."""
    product, numbers = one(PanelLayout(bits, *shape, group))
    generator = np.random.default_rng(1)
    tokens = (mean + generator.standard_normal((num_tokens, shape[1]))).astype(np.float32)
    bias = generator.standard_normal(shape[0]).astype(np.float32) * has_bias
    exact = tokens.astype(np.float64) @ numbers.T + bias
    out = product(way, tokens, bias if has_bias else None)
    most = rounding(tokens, way, group) @ np.abs(numbers).T + 1e-5
    most += 1e-5 * (np.abs(tokens) @ np.abs(numbers).T if way == "many" else np.abs(exact))
    assert (np.abs(out - exact) <= most).all()


@needs_gemm
@pytest.mark.parametrize("bits", [8, 4])
def test_tokens_that_are_multiples_of_their_step_are_multiplied_exactly(bits):
    product, numbers = one(PanelLayout(bits, 40, 96, 32))
    tokens = np.random.default_rng(2).integers(0, 255, (9, 3, CHUNK))
    tokens[:, :, :2] = 0, 254
    tokens = (tokens.reshape(9, -1) - 100.0).astype(np.float32)
    exact = tokens.astype(np.float64) @ numbers.T
    assert np.abs(product("many", tokens) - exact).max() <= 1e-5 * (np.abs(tokens) @ np.abs(numbers).T).max()


@pytest.mark.parametrize(("way", "num_tokens"), [("few", 3), pytest.param("many", 70, marks=needs_gemm)])
def test_products_when_in_bfloat16_then_are_rounded_to_nearest(way, num_tokens):
    product, _ = one(PanelLayout(4, 40, 96, 32))
    tokens, exact = random_numbers(num_tokens, 96, storage="bfloat16", seed=1)
    bias, exact_bias = random_numbers(40, storage="bfloat16", seed=2)
    whole = product(way, exact.astype(np.float32), exact_bias.astype(np.float32))
    assert (np.abs(as_float(product(way, tokens, bias)) - whole) <= 2.0**-8 * np.abs(whole)).all()


@EVERY_WAY
def test_products_do_not_depend_on_threads_or_on_what_else_is_multiplied(way):
    product, _ = one(PanelLayout(4, 300, 256, 64))
    tokens, _ = random_numbers(13, 256, seed=1)
    together = product(way, tokens)
    for _ in every_number_of_threads():
        assert (np.concatenate([product(way, tokens[i : i + 1]) for i in range(13)]) == together).all()


@needs_gemm
def test_products_of_several_blocks_of_tokens_are_those_of_each_block():
    product, _ = one(PanelLayout(4, 40, 8192, 128))
    tokens, _ = random_numbers(400, 8192, seed=1)
    alone = [product("many", tokens[first : first + 50]) for first in range(0, 400, 50)]
    assert (product("many", tokens) == np.concatenate(alone)).all()


@EVERY_WAY
@pytest.mark.parametrize("outlier", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("bits", [8, 4])
def test_an_outlier_costs_the_numbers_of_other_groups_and_tokens_nothing(way, outlier, bits):
    product, numbers = one(PanelLayout(bits, 32, 256, 32))
    tokens, _ = random_numbers(7, 256, seed=1)
    far = tokens.copy()
    far[0, 5] = outlier
    out = product(way, far)
    assert (out[1:] == product(way, tokens)[1:]).all()
    exact = far.astype(np.float64) @ numbers.T
    assert (np.abs(out - exact) <= rounding(far, way) @ np.abs(numbers).T + 1e-5 * outlier).all()


@EVERY_WAY
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_tokens_that_are_not_finite_give_outputs_that_are_not(way, value):
    product, _ = one(PanelLayout(8, 20, 40, 32))
    tokens = np.zeros((8, 40), np.float32)
    tokens[0, 3] = value
    for number in (2, 8):
        out = product(way, tokens[:number])
        assert not np.isfinite(out[0]).any()
        assert (out[1:] == 0).all()


@EVERY_WAY
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-20, 1e30])
def test_tokens_of_any_size_are_kept(way, size):
    product, numbers = one(PanelLayout(8, 20, 64, 32))
    tokens = (random_numbers(6, 64, seed=1)[1] * size).astype(np.float32)
    tokens[1] = size
    exact = tokens.astype(np.float64) @ numbers.T
    # The last term is so small that no model computes with it.
    most = rounding(tokens, way) @ np.abs(numbers).T + 1e-5 * np.abs(exact) + 1e-27
    assert (np.abs(product(way, tokens) - exact) <= most).all()


# --- weights that each token chooses


def choices(num_tokens: int, of_token: int, seed: int = 1) -> np.ndarray:
    """Choose different weights for each token; the last choice of the last token is none."""
    generator = np.random.default_rng(seed)
    chosen = np.array([generator.permutation(COUNT)[:of_token] for _ in range(num_tokens)])
    chosen[-1, -1] = COUNT
    return chosen


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ["rows", "columns", "8", "4"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (17, 33), (50, 100), (130, 200), (40, 2048), (1100, 70)], ids=str)
@pytest.mark.parametrize(("num_tokens", "of_token"), [(1, 1), (1, 4), (2, 3), (9, 2), (40, 6)])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("has_own", [False, True], ids=["", "own"])
def test_products_with_chosen_weights_are_those_in_float64(
    kind, shape, num_tokens, of_token, storage, has_bias, has_own
):
    given, chosen = weights(kind, *shape, storage), choices(num_tokens, of_token)
    tokens, exact_tokens = random_numbers(num_tokens * (of_token if has_own else 1), shape[1], storage=storage, seed=2)
    bias, exact_bias = random_numbers(COUNT, shape[0], storage=storage, seed=3)
    out = as_float(run(given.products, tokens, shape[0], bias if has_bias else None, chosen))
    exact = np.zeros(out.shape)
    for pair, index in enumerate(chosen.ravel()):
        if index < COUNT:
            exact[pair] = given.exact[index] @ exact_tokens[pair * len(tokens) // chosen.size]
            exact[pair] += exact_bias[index] * has_bias
    of_all = np.abs(given.exact).sum(2).max() * np.abs(exact_tokens).max()
    most = 1e-6 * of_all if kind in ("rows", "columns") else of_all / 65278 + 1e-5 * np.abs(exact) + 1e-5
    assert (np.abs(out - exact) <= most + (2.0**-8 * np.abs(exact) if storage == "bfloat16" else 0)).all()


def test_products_do_not_depend_on_threads_or_on_what_others_choose():
    given, chosen = weights("rows", 300, 256, "bfloat16"), choices(13, 3)
    tokens, _ = random_numbers(13, 256, storage="bfloat16", seed=1)
    together = run(given.products, tokens, 300, chosen=chosen)
    for _ in every_number_of_threads():
        alone = [run(given.products, tokens[i : i + 1], 300, chosen=chosen[i : i + 1]) for i in range(13)]
        assert (np.concatenate(alone) == together).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_a_weight_reaches_only_those_who_chose_it(value):
    given = weights.__wrapped__("rows", 20, 70)
    given.kept[2, 5, 69] = value
    out = run(given.products, random_numbers(2, 70, seed=1)[0], 20, chosen=np.array([[1, 2], [3, 4]]))
    assert not np.isfinite(out[1, 5])
    out[1, 5] = 0
    assert np.isfinite(out).all()


@pytest.mark.parametrize("index", [-1, COUNT + 1, 2**40])
def test_indices_of_no_weight_are_counted(index):
    tokens, _ = random_numbers(2, 64, seed=1)
    chosen = np.array([[0, index], [index, 1]])
    out = run(weights("rows", 20, 64).products, tokens, 20, chosen=chosen, wrong=2)
    assert (out[1:3] == 0).all()
    assert (out[[0, 3]] != 7).all()
