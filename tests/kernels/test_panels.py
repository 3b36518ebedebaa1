"""Quantized weights: their codes read one by one, and products with them, against float64."""

from collections.abc import Callable

import numpy as np
import pytest

from hf_hybrid_cache.kernels import (
    PanelLayout,
    Products,
    dequantize_panels,
    factor_of,
    get_num_threads,
    quantize_panels,
    set_num_threads,
)
from kernels.reference import stored

SHAPES = [(1, 1), (16, 32), (17, 33), (48, 64), (50, 100), (130, 200)]
GROUPS = (32, 64, 128)
# The factor for normal weights.
FACTOR = factor_of(4.0)


def quantized(weight: np.ndarray, layout: PanelLayout, factor: float = FACTOR) -> np.ndarray:
    panels = np.full(layout.num_bytes, 255, np.uint8)
    quantize_panels(weight, layout, factor, panels)
    return panels


def taken_apart(panels: np.ndarray, layout: PanelLayout, factor: float = FACTOR) -> tuple[np.ndarray, np.ndarray]:
    """Dequantize the rows code by code, `[rows, columns]`; return them with the quantization step of each number."""
    lines = panels.view(np.uint32).reshape(layout.panels, layout.groups, 1 + layout.group_words, 16)
    numbers, steps = np.zeros((2, layout.rows, layout.columns))
    for row in range(layout.rows):
        panel, lane = divmod(row, 16)
        for column in range(layout.columns):
            index, place = divmod(column, layout.group)
            line = lines[panel, index, :, lane]
            halves = lines[panel, index, 0].view(np.float16).astype(np.float64) * factor
            scale, minimum = halves[lane], halves[16 + lane]
            word, place = divmod(place, 32 // layout.bits)
            shift = place // 2 * layout.bits + place % 2 * 16
            code = int(line[1 + word]) >> shift & (2**layout.bits - 1)
            numbers[row, column], steps[row, column] = minimum + scale * code, scale
    return numbers, steps


def random_weight(rows: int, columns: int, storage: str = "float32", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a random weight as kernels read it, and in float64."""
    generator = np.random.default_rng(seed)
    return stored(generator.standard_normal((rows, columns)).astype(np.float32), storage)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_every_weight_is_within_half_a_step_of_what_its_code_says(shape, group, bits, storage):
    given, exact = random_weight(*shape, storage)
    layout = PanelLayout(bits, *shape, group)
    numbers, steps = taken_apart(quantized(given, layout), layout)
    # Least and largest numbers are rounded to 11 bits.
    assert (np.abs(numbers - exact) <= 0.501 * steps + 2.0**-11 * np.abs(exact).max()).all()
    for start in range(0, layout.columns, group):
        numbers_of, exact_of = numbers[:, start : start + group], exact[:, start : start + group]
        half_a_step = 0.501 * np.ptp(exact_of, axis=1, keepdims=True) / (2**bits - 1)
        assert (np.abs(numbers_of - exact_of) <= half_a_step + 2.0**-11 * np.abs(exact).max()).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_decoding_gives_what_the_codes_say(shape, bits):
    layout = PanelLayout(bits, *shape, 64)
    panels = quantized(random_weight(*shape)[0], layout)
    numbers, _ = taken_apart(panels, layout)
    decoded = np.full(shape, np.nan, np.float32)
    dequantize_panels(panels, layout, FACTOR, decoded)
    assert np.abs(decoded - numbers).max() < 1e-6
    in_bfloat16 = np.full(shape, 0x7FC0, np.uint16)
    dequantize_panels(panels, layout, FACTOR, in_bfloat16)
    wider = np.full((shape[0], shape[1] + 3), 7, np.uint16)
    dequantize_panels(panels, layout, FACTOR, wider)
    assert (wider[:, : shape[1]] == in_bfloat16).all()
    assert (wider[:, shape[1] :] == 7).all()
    as_float = (in_bfloat16.astype(np.uint32) << 16).view(np.float32)
    assert (np.abs(as_float - decoded) <= 2.0**-8 * np.abs(decoded)).all()
    for panel in range(layout.panels):
        of_panel = np.empty_like(decoded[panel * 16 : panel * 16 + 16])
        dequantize_panels(panels, layout, FACTOR, of_panel, first=panel)
        assert (of_panel == decoded[panel * 16 : panel * 16 + 16]).all()


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_panels_that_are_quantized_alone_are_those_of_the_whole_weight(storage):
    layout = PanelLayout(4, 50, 100, 64)
    given, _ = random_weight(50, 100, storage)
    alone = np.full(layout.num_bytes, 255, np.uint8)
    for panel in (1, 0, 3, 2):
        quantize_panels(given[panel * 16 : panel * 16 + 16], layout, FACTOR, alone, first=panel)
    assert (alone == quantized(given, layout)).all()


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 9, 21])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_products_are_those_with_the_decoded_weights(shape, num_tokens, bits, has_bias):
    layout = PanelLayout(bits, *shape, 32)
    panels = quantized(random_weight(*shape)[0], layout)
    numbers, _ = taken_apart(panels, layout)
    generator = np.random.default_rng(1)
    tokens = generator.standard_normal((num_tokens, layout.columns)).astype(np.float32)
    bias = generator.standard_normal(layout.rows).astype(np.float32) * has_bias
    exact = tokens.astype(np.float64) @ numbers.T + bias
    out = product(tokens, panels, layout, bias if has_bias else None)
    # Tokens are rounded to 16 bits of the largest in their group.
    most = np.abs(tokens).max(1, keepdims=True) / 65278 * np.abs(numbers).sum(1) + 1e-5 * np.abs(exact) + 1e-5
    assert (np.abs(out - exact) <= most).all()


def product(
    tokens: np.ndarray,
    panels: np.ndarray,
    layout: PanelLayout,
    bias: np.ndarray | None = None,
    multiply: Callable[..., None] = Products.multiply,
) -> np.ndarray:
    out = np.full((len(tokens), layout.rows), 7, tokens.dtype)
    addresses = tokens.ctypes.data, 0 if bias is None else bias.ctypes.data
    given = addresses[0], len(tokens), tokens.dtype == np.uint16, addresses[1], out.ctypes.data
    multiply(Products.of_panels(panels.ctypes.data, layout, [FACTOR]), 0, *given)
    return out


def check_products_of_bfloat16(num_tokens: int, multiply: Callable[..., None]) -> None:
    layout = PanelLayout(4, 40, 96, 32)
    panels = quantized(random_weight(40, 96)[0], layout)
    tokens, exact = random_weight(num_tokens, 96, "bfloat16", seed=1)
    bias, _ = random_weight(1, 40, "bfloat16", seed=2)
    single_bias = (bias[0].astype(np.uint32) << 16).view(np.float32)
    whole = product(exact.astype(np.float32), panels, layout, single_bias, multiply)
    halves = (product(tokens, panels, layout, bias[0], multiply).astype(np.uint32) << 16).view(np.float32)
    assert (np.abs(halves - whole) <= 2.0**-8 * np.abs(whole)).all()


def check_products_alone(multiply: Callable[..., None]) -> None:
    """Check that each token has the same product alone and with others, on any number of threads."""
    layout = PanelLayout(4, 300, 256, 64)
    panels = quantized(random_weight(300, 256)[0], layout)
    tokens = random_weight(13, 256, seed=1)[0]
    together = product(tokens, panels, layout, None, multiply)
    most = get_num_threads()
    for threads in range(1, most + 1):
        set_num_threads(threads)
        try:
            each = [product(tokens[index : index + 1], panels, layout, None, multiply) for index in range(13)]
        finally:
            set_num_threads(None)
        assert (np.concatenate(each) == together).all()


def check_not_finite(value: float, num_tokens: int, multiply: Callable[..., None]) -> None:
    layout = PanelLayout(8, 20, 40, 32)
    panels = quantized(random_weight(20, 40)[0], layout)
    tokens = np.zeros((num_tokens, 40), np.float32)
    tokens[0, 3] = value
    out = product(tokens, panels, layout, None, multiply)
    assert not np.isfinite(out[0]).any()
    assert (out[1:] == 0).all()


def test_products_of_bfloat16_are_rounded_to_the_nearest():
    check_products_of_bfloat16(3, Products.multiply)


def test_products_do_not_depend_on_threads_or_on_what_else_is_multiplied():
    check_products_alone(Products.multiply)


@pytest.mark.parametrize("outlier", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("bits", [8, 4])
def test_an_outlier_among_the_inputs_costs_the_other_groups_nothing(outlier, bits):
    layout = PanelLayout(bits, 32, 256, 32)
    panels = quantized(random_weight(32, 256)[0], layout)
    numbers, _ = taken_apart(panels, layout)
    tokens = random_weight(1, 256, seed=1)[0]
    tokens[0, 5] = outlier
    zeroed = tokens.copy()
    zeroed[0, :32] = 0
    error = np.abs(product(zeroed, panels, layout) - zeroed.astype(np.float64) @ numbers.T)
    assert error.max() < 2e-3
    exact = tokens.astype(np.float64) @ numbers.T
    assert (np.abs(product(tokens, panels, layout) - exact) <= 2e-3 * max(1, outlier)).all()


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
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


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_tokens_that_are_not_finite_give_outputs_that_are_not(value):
    check_not_finite(value, 2, Products.multiply)


@pytest.mark.parametrize("largest", [1e-42, 1e-30, 1e-3, 1.0, 3e4, 1e38, np.finfo(np.float32).max])
def test_weights_of_any_size_are_kept(largest):
    weight = random_weight(16, 64)[0]
    weight *= np.float32(largest) / np.abs(weight).max()
    weight[1] = largest
    weight[2] = 0
    factor = factor_of(float(np.abs(weight).max()))
    layout = PanelLayout(4, 16, 64, 32)
    numbers, steps = taken_apart(quantized(weight, layout, factor), layout, factor)
    assert (np.abs(numbers - weight) <= 0.51 * steps + 2.0**-11 * largest + 1e-45).all()
    assert (numbers[2] == 0).all()
    assert (np.abs(numbers[1] / weight[1] - 1) <= 2.0**-11).all() or largest < 1e-37
