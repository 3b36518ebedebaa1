"""
Weights as kernels read them, quantized or not; products of tokens with them, and the sums of experts, against float64.

Codes are read one by one, so that what is computed with quantized weights is compared with what these stand for.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from hf_hybrid_cache.kernels import (
    ExpertCall,
    PanelLayout,
    Products,
    add_up_experts,
    dequantize_panels,
    factor_of,
    get_num_threads,
    has_gemm,
    multiply_many,
    quantize_panels,
    set_num_threads,
)
from kernels.reference import from_bfloat16, stored

# Around panels of 16 rows, and groups of columns.
SHAPES = [(1, 1), (16, 32), (17, 33), (48, 64), (50, 100), (130, 200)]
GROUPS = (32, 64, 128)
# The factor for normal weights.
FACTOR = factor_of(4.0)
# So many weights to choose from; tokens are rounded by so many columns.
COUNT, CHUNK = 6, 32
needs_gemm = pytest.mark.skipif(not has_gemm(), reason="the processor does not add up four products of 8 bits")
MANY = pytest.param("many", marks=needs_gemm)
# The kernel of few tokens rounds them to 16 bits, that of many tokens to 8.
WAYS: dict[str, Callable[..., object]] = {"few": Products.multiply, "many": multiply_many}
EVERY_WAY = pytest.mark.parametrize("way", ["few", MANY])
EVERY_STORAGE = pytest.mark.parametrize("storage", ["float32", "bfloat16"])
EVERY_KIND = pytest.mark.parametrize("kind", ["rows", "8", "4"])


def quantized(weight: np.ndarray, layout: PanelLayout, factor: float = FACTOR) -> np.ndarray:
    panels = np.full(layout.num_bytes, 255, np.uint8)
    quantize_panels(weight, layout, factor, panels)
    return panels


def taken_apart(panels: np.ndarray, layout: PanelLayout, factor: float = FACTOR) -> tuple[np.ndarray, np.ndarray]:
    """Dequantize the rows, `[rows, columns]`; return them with the quantization step of each number."""
    lines = panels.view(np.uint32).reshape(layout.panels, layout.groups, 1 + layout.group_words, 16)
    halves = np.ascontiguousarray(lines[:, :, 0]).view(np.float16).astype(np.float64)[:, :, None] * factor
    word, place = np.divmod(np.arange(layout.group), 32 // layout.bits)
    shifts = (place // 2 * layout.bits + place % 2 * 16).astype(np.uint32)
    codes = lines[:, :, 1 + word] >> shifts[:, None] & np.uint32(2**layout.bits - 1)
    scales, minima = halves[..., :16], halves[..., 16:]
    numbers, steps = (
        each.transpose(0, 3, 1, 2).reshape(layout.panels * 16, -1)[: layout.rows, : layout.columns]
        for each in (minima + scales * codes, scales + 0 * codes)
    )
    return numbers, steps


def random_numbers(*shape: int, storage: str = "float32", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random numbers as kernels read them, and in float64."""
    return stored(np.random.default_rng(seed).standard_normal(shape), storage)


# --- quantized weights


@pytest.mark.default("pairs")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", [8, 4])
@EVERY_STORAGE
def test_every_weight_is_within_half_a_step_of_what_its_code_says(shape, group, bits, storage):
    given, exact = random_numbers(*shape, storage=storage)
    layout = PanelLayout(bits, *shape, group)
    panels = quantized(given, layout)
    numbers, steps = taken_apart(panels, layout)
    # Least and largest numbers are rounded to 11 bits.
    rounding = 2.0**-11 * np.abs(exact).max()
    assert (np.abs(numbers - exact) <= 0.501 * steps + rounding).all()
    for start in range(0, layout.columns, group):
        of_group = np.s_[:, start : start + group]
        half_a_step = 0.501 * np.ptp(exact[of_group], axis=1, keepdims=True) / (2**bits - 1)
        assert (np.abs(numbers - exact)[of_group] <= half_a_step + rounding).all()
    # The same in panels that are coded and decoded one by one, in a matrix that has more columns.
    alone, decoded = np.full_like(panels, 255), np.full((shape[0], shape[1] + 3), 7, given.dtype)
    for panel in reversed(range(layout.panels)):
        rows = slice(panel * 16, panel * 16 + 16)
        quantize_panels(given[rows], layout, FACTOR, alone, first=panel)
        dequantize_panels(panels, layout, FACTOR, decoded[rows], first=panel)
    assert (alone == panels).all()
    assert (decoded[:, shape[1] :] == 7).all()
    of_type = 2.0**-8 * np.abs(numbers) if storage == "bfloat16" else 1e-6
    assert (np.abs(as_float(decoded)[:, : shape[1]] - numbers) <= of_type).all()
    whole = np.empty(shape, given.dtype)
    dequantize_panels(panels, layout, FACTOR, whole)
    assert (whole == decoded[:, : shape[1]]).all()


@EVERY_STORAGE
@pytest.mark.parametrize("group", GROUPS)
def test_weights_that_were_made_for_four_bits_stay_what_they_are(group, storage):
    generator = np.random.default_rng(0)
    codes = generator.integers(-8, 8, (48, 4, 32))
    scales = generator.uniform(0.01, 0.1, (48, 4, 1)).astype(np.float16)
    scales = np.repeat(scales[:, :: group // 32], group // 32, axis=1)  # groups of that file, of 32 or more
    given, exact = stored((codes * scales.astype(np.float32)).reshape(48, 128), storage)
    layout = PanelLayout(4, 48, 128, group)
    numbers, _ = taken_apart(quantized(given, layout), layout)
    rounding = 2.0**-8 if storage == "bfloat16" else 2.0**-11
    assert np.abs(numbers - exact).max() <= 2 * rounding * np.abs(exact).max()


@pytest.mark.parametrize("largest", [1e-42, 1e-30, 1e-3, 1.0, 3e4, 1e38, np.finfo(np.float32).max])
def test_weights_of_any_size_are_kept(largest):
    weight = random_numbers(16, 64)[0]
    weight *= np.float32(largest) / np.abs(weight).max()
    weight[1] = largest
    weight[2] = 0
    factor = factor_of(float(np.abs(weight).max()))
    layout = PanelLayout(4, 16, 64, 32)
    numbers, steps = taken_apart(quantized(weight, layout, factor), layout, factor)
    assert (np.abs(numbers - weight) <= 0.51 * steps + 2.0**-11 * largest + 1e-45).all()
    assert (numbers[2] == 0).all()
    assert (np.abs(numbers[1] / weight[1] - 1) <= 2.0**-11).all() or largest < 1e-37


# --- products with one weight, and with weights that each token chooses


class Weights(NamedTuple):
    """Several weights as kernels read them, in float64, and what must be kept meanwhile."""

    products: Products
    exact: np.ndarray
    kept: np.ndarray

    def run(
        self,
        tokens: np.ndarray,
        bias: np.ndarray | None = None,
        chosen: np.ndarray | None = None,
        way: str = "few",
        wrong: int = 0,
    ) -> np.ndarray:
        """Multiply with the first weight, or with those that are chosen, of which so many are none."""
        pairs = len(tokens) if chosen is None else chosen.size
        out = np.full((pairs, self.exact.shape[1]), 7, tokens.dtype)
        bias_at = 0 if bias is None else bias.ctypes.data
        given = [tokens.ctypes.data, pairs, tokens.dtype == np.uint16, bias_at, out.ctypes.data]
        if chosen is not None:
            chosen = np.ascontiguousarray(chosen, np.int64)
            given += [chosen.ctypes.data, pairs // len(tokens)]
        found = WAYS[way](self.products, 0, *given)
        assert chosen is None or found == wrong
        return out


@cache
def weights(kind: str, rows: int, columns: int, storage: str = "float32", seed: int = 0, group: int = CHUNK) -> Weights:
    """Random weights as "rows", or in "8" or "4" bits."""
    given, exact = random_numbers(COUNT, rows, columns, storage=storage, seed=seed)
    if kind == "rows":
        return Weights(
            Products.of_numbers(given.ctypes.data, COUNT, rows, columns, storage == "bfloat16"), exact, given
        )
    layout, sizes = PanelLayout(int(kind), rows, columns, group), 2.0 ** np.arange(COUNT, dtype=np.float32)
    factors = [factor_of(4.0 * float(size)) for size in sizes]
    given = random_numbers(COUNT, rows, columns, seed=seed)[0] * sizes[:, None, None]
    kept = np.array([quantized(each, layout, of) for each, of in zip(given, factors, strict=True)])
    exact = np.array([taken_apart(panels, layout, of)[0] for panels, of in zip(kept, factors, strict=True)])
    return Weights(Products.of_panels(kept.ctypes.data, layout, factors), exact, kept)


def as_float(out: np.ndarray) -> np.ndarray:
    return from_bfloat16(out) if out.dtype == np.uint16 else out


def every_number_of_threads() -> Iterator[int]:
    for threads in range(1, get_num_threads() + 1):
        set_num_threads(threads)
        try:
            yield threads
        finally:
            set_num_threads(None)


def rounding(tokens: np.ndarray, way: str, group: int) -> np.ndarray:
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


def check(way: str, given: Weights, tokens: np.ndarray, bias: np.ndarray | None = None, group: int = CHUNK) -> None:
    """Check that products with decoded weights are off by the rounding of tokens, and of results, alone."""
    numbers, exact_tokens = given.exact[0], as_float(tokens).astype(np.float64)
    added = np.zeros(len(numbers)) if bias is None else as_float(bias)
    exact = exact_tokens @ numbers.T + added
    # The last term is so small that no model computes with it.
    most = (rounding(exact_tokens, way, group) + 1e-5 * np.abs(exact_tokens)) @ np.abs(numbers).T + 1e-27
    most += 1e-5 * np.abs(added) + (2.0**-8 * np.abs(exact) if tokens.dtype == np.uint16 else 0)
    assert (np.abs(as_float(given.run(tokens, bias, way=way)) - exact) <= most).all()


@pytest.mark.default("pairs")
@EVERY_WAY
@pytest.mark.parametrize("shape", [*SHAPES, (70, 1025)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 6, 8, 9, 21, 65])
@pytest.mark.parametrize("kind", ["8", "4"])
@pytest.mark.parametrize("group", GROUPS)
@EVERY_STORAGE
@pytest.mark.parametrize("mean", [0.0, 3.0, -1000.0])
def test_products_are_those_with_the_decoded_weights(way, shape, num_tokens, kind, group, storage, mean):
    generator = np.random.default_rng(1)
    tokens, _ = stored(mean + generator.standard_normal((num_tokens, shape[1])), storage)
    bias, _ = stored(generator.standard_normal(shape[0]), storage)
    check(way, weights(kind, *shape, group=group), tokens, bias if mean else None, group)


@EVERY_WAY
@pytest.mark.parametrize("outlier", [1.0, 1e4, 1e30, np.nan, -np.inf])
def test_an_outlier_costs_the_numbers_of_other_groups_and_tokens_nothing(way, outlier):
    """It makes the outputs of its own token infinite, or not a number, if it is."""
    given = weights("4", 32, 256)
    tokens, _ = random_numbers(7, 256, seed=1)
    far = tokens.copy()
    far[0, 5] = outlier
    for count in (2, 7):
        out = given.run(far[:count], way=way)
        assert (out[1:] == given.run(tokens, way=way)[1:count]).all()
        if np.isfinite(outlier):
            check(way, given, far[:count])
        else:
            assert not np.isfinite(out[0]).any()


@EVERY_WAY
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-20, 1e30])
def test_tokens_of_any_size_are_kept(way, size):
    tokens = (random_numbers(6, 64, seed=1)[1] * size).astype(np.float32)
    tokens[1] = size
    check(way, weights("8", 20, 64), tokens)


@needs_gemm
@pytest.mark.parametrize("kind", ["8", "4"])
def test_tokens_that_are_multiples_of_their_step_are_multiplied_exactly(kind):
    given, tokens = weights(kind, 40, 96), np.random.default_rng(2).integers(0, 255, (9, 3, CHUNK))
    tokens[:, :, :2] = 0, 254
    tokens = (tokens.reshape(9, -1) - 100.0).astype(np.float32)
    exact, most = tokens.astype(np.float64) @ given.exact[0].T, 1e-5 * (np.abs(tokens) @ np.abs(given.exact[0]).T).max()
    assert np.abs(given.run(tokens, way="many") - exact).max() <= most


def choices(num_tokens: int, of_token: int) -> np.ndarray:
    """Choose different weights for each token; the last choice of the last token is none."""
    generator = np.random.default_rng(1)
    chosen = np.array([generator.permutation(COUNT)[:of_token] for _ in range(num_tokens)])
    chosen[-1, -1] = COUNT
    return chosen


@pytest.mark.default("pairs")
@EVERY_KIND
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (17, 33), (50, 100), (130, 200), (40, 2048), (1100, 70)], ids=str)
@pytest.mark.parametrize(("num_tokens", "of_token"), [(1, 1), (1, 4), (2, 3), (9, 2), (40, 6)])
@EVERY_STORAGE
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("has_own", [False, True], ids=["", "own"])
def test_products_with_chosen_weights_are_those_in_float64(
    kind, shape, num_tokens, of_token, storage, has_bias, has_own
):
    given, chosen = weights(kind, *shape, storage), choices(num_tokens, of_token)
    tokens, exact_tokens = random_numbers(num_tokens * (of_token if has_own else 1), shape[1], storage=storage, seed=2)
    bias, exact_bias = random_numbers(COUNT, shape[0], storage=storage, seed=3)
    out = as_float(given.run(tokens, bias if has_bias else None, chosen))
    exact = np.zeros(out.shape)
    for pair, index in enumerate(chosen.ravel()):
        if index < COUNT:
            exact[pair] = given.exact[index] @ exact_tokens[pair * len(tokens) // chosen.size]
            exact[pair] += exact_bias[index] * has_bias
    of_all = np.abs(given.exact).sum(2).max() * np.abs(exact_tokens).max()
    most = 1e-6 * of_all if kind == "rows" else of_all / 65278 + 1e-5 * np.abs(exact) + 1e-5
    assert (np.abs(out - exact) <= most + (2.0**-8 * np.abs(exact) if storage == "bfloat16" else 0)).all()


@pytest.mark.parametrize(
    ("way", "kind", "columns", "tokens", "at_once", "of_token"),
    [
        ("few", "4", 256, 13, 1, 0),
        ("few", "rows", 256, 13, 1, 3),
        pytest.param("many", "4", 256, 13, 1, 0, marks=needs_gemm),
        pytest.param("many", "4", 8192, 400, 50, 0, marks=needs_gemm),  # of several blocks of tokens
    ],
)
def test_products_do_not_depend_on_threads_or_on_other_tokens(way, kind, columns, tokens, at_once, of_token):
    given, numbers = weights(kind, 70, columns), random_numbers(tokens, columns, seed=1)[0]
    chosen = choices(tokens, of_token) if of_token else None
    together = given.run(numbers, chosen=chosen, way=way)
    parts = [slice(first, first + at_once) for first in range(0, tokens, at_once)]
    for _ in every_number_of_threads():
        alone = [given.run(numbers[i], chosen=None if chosen is None else chosen[i], way=way) for i in parts]
        assert (np.concatenate(alone) == together).all()


# --- sums of experts


class Experts(NamedTuple):
    """Gated experts and what they get; `exact` has tokens, router weights and both biases in float64."""

    up: Weights
    down: Weights
    tokens: np.ndarray
    chosen: np.ndarray
    router_weights: np.ndarray
    up_bias: np.ndarray | None
    down_bias: np.ndarray | None
    exact: tuple[np.ndarray, ...]

    def run(self, wrong: int = 0) -> np.ndarray:
        out = np.full(self.tokens.shape, 7, np.float32)
        chosen = np.ascontiguousarray(self.chosen, np.int64)
        up_bias, down_bias = (0 if each is None else each.ctypes.data for each in (self.up_bias, self.down_bias))
        call = ExpertCall(
            chosen=chosen.ctypes.data,
            num_pairs=chosen.size,
            tokens=self.tokens.ctypes.data,
            choices=chosen.shape[1],
            is_bfloat16=self.tokens.dtype == np.uint16,
            router_weights=self.router_weights.ctypes.data,
            has_bfloat16_router_weights=self.router_weights.dtype == np.uint16,
            up_bias=up_bias,
            down_bias=down_bias,
            out=out.ctypes.data,
        )
        assert add_up_experts(self.up.products, self.down.products, call) == wrong
        return out

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums, and their largest possible values if nothing cancelled out."""
        tokens, router_weights, up_bias, down_bias = self.exact
        sums, sizes = np.zeros_like(tokens), np.zeros_like(tokens)
        for token, choice in np.ndindex(self.chosen.shape):
            index = self.chosen[token, choice]
            if not 0 <= index < COUNT:
                continue
            up, down = self.up.exact[index], self.down.exact[index]
            gate, linear = np.split(up @ tokens[token] + up_bias[index], 2)
            largest = np.split(np.abs(up) @ np.abs(tokens[token]) + np.abs(up_bias[index]), 2)
            with np.errstate(over="ignore"):
                result = down @ (gate / (1 + np.exp(-gate)) * linear) + down_bias[index]
            sums[token] += router_weights[token, choice] * result
            size = np.abs(down) @ np.prod(largest, axis=0) + np.abs(down_bias[index])
            sizes[token] += np.abs(router_weights[token, choice]) * size
        return sums, sizes


def experts(
    kind: str,
    hidden: int,
    gated: int,
    storage: str = "float32",
    tokens: int = 3,
    of_token: int = 2,
    has_bias: bool = False,
) -> Experts:
    up, down = weights(kind, 2 * gated, hidden, storage), weights(kind, hidden, gated, storage, seed=1)
    shapes = (tokens, hidden), (tokens, of_token), (COUNT, 2 * gated), (COUNT, hidden)
    numbers = [random_numbers(*shape, storage=storage, seed=seed) for seed, shape in enumerate(shapes, 2)]
    given, exact = zip(*numbers, strict=True)
    biases = given[2:] if has_bias else (None, None)
    exact = (*exact[:2], *(each * has_bias for each in exact[2:]))
    return Experts(up, down, given[0], choices(tokens, of_token), given[1], *biases, exact)


# Hidden and gated columns straddle those of a vector, of a row's step and of a group. The last ones of tokens and their
# choices are more than a thread gates at a time.
@pytest.mark.default("pairs")
@EVERY_KIND
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (33, 17), (100, 50), (96, 130), (256, 96)], ids=str)
@pytest.mark.parametrize(("tokens", "of_token"), [(1, 1), (1, 4), (3, 2), (40, 6)])
@EVERY_STORAGE
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_sums_of_experts_are_those_in_float64(kind, shape, tokens, of_token, storage, has_bias):
    """Quantized experts compute with their decoded weights."""
    some = experts(kind, *shape, storage, tokens, of_token, has_bias)
    sums, sizes = some.expected()
    # Tokens, and then gated numbers, are rounded to 16 bits of the largest number in a group.
    most = 3e-6 * sizes if kind == "rows" else 1e-4 * sizes + 1e-6
    assert (np.abs(some.run() - sums) <= most).all()


@pytest.mark.parametrize("kind", ["rows", "4"])
def test_many_numbers_are_shared_out_to_the_same_sums(kind):
    some = experts(kind, 320, 96, "bfloat16", 400, 3)
    together, (sums, sizes) = some.run(), some.expected()
    assert (np.abs(together - sums) <= 1e-4 * sizes).all()
    for _ in every_number_of_threads():
        alone = []
        for part in (slice(0, 1), slice(1, 9), slice(9, 400)):
            names = ("tokens", "chosen", "router_weights")
            alone.append(some._replace(**{name: getattr(some, name)[part] for name in names}).run())
        assert (np.concatenate(alone) == together).all()


@pytest.mark.parametrize("gate", [0.0, -1e-30, 20.0, -20.0, 100.0, -100.0, 3e4, -3e4, np.inf, np.nan])
def test_the_gate_is_a_silu_at_every_size(gate):
    up = np.concatenate([np.full((COUNT, 17, 1), gate, np.float32), np.ones((COUNT, 17, 1), np.float32)], axis=1)
    down = np.ones((COUNT, 1, 17), np.float32)
    up_weights, down_weights = (
        Weights(Products.of_numbers(each.ctypes.data, *each.shape, is_bfloat16=False), each, each)
        for each in (up, down)
    )
    one_alone = np.ones((1, 1), np.float32)
    some = Experts(up_weights, down_weights, one_alone, np.array([[0]]), one_alone, None, None, ())
    with np.errstate(over="ignore", invalid="ignore"):
        exact = 17 * np.float64(gate) / (1 + np.exp(-np.float64(gate)))
    np.testing.assert_allclose(some.run()[0, 0], exact, rtol=1e-6, atol=1e-35)


# --- choices that are none, and weights that are not finite


@pytest.mark.parametrize("index", [-1, COUNT + 1, 2**40])
def test_indices_of_no_weight_are_counted_and_add_nothing(index):
    chosen = np.array([[0, index], [index, index], [1, 2]])
    some = experts("rows", 40, 20)._replace(chosen=chosen)
    out, (sums, sizes) = some.run(wrong=3), some.expected()
    assert (np.abs(out - sums) <= 3e-6 * sizes).all()
    assert (out[1] == 0).all()
    tokens, _ = random_numbers(3, 64, seed=1)
    out = weights("rows", 20, 64).run(tokens, chosen=chosen, wrong=3)
    assert (out[1:4] == 0).all()
    assert (out[[0, 4, 5]] != 7).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_a_weight_reaches_only_those_who_chose_it(value):
    given = weights.__wrapped__("rows", 40, 40)
    given.kept[3, 39, 5] = value
    chosen = np.array([[0, 1], [2, 3], [4, 5]])
    out = given.run(random_numbers(3, 40, seed=1)[0], chosen=chosen)
    assert not np.isfinite(out[3, 39])
    out[3, 39] = 0
    assert np.isfinite(out).all()
    of_experts = experts("rows", 40, 20)._replace(up=given, chosen=chosen).run()
    assert not np.isfinite(of_experts[1]).any()
    assert np.isfinite(of_experts[[0, 2]]).all()
