"""Quantized weights: their codes read one by one, against float64."""

import numpy as np
import pytest

from hf_hybrid_cache.kernels import PanelLayout, dequantize_panels, factor_of, quantize_panels
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
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return stored(numbers, storage)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_every_weight_is_within_half_a_step_of_what_its_code_says(shape, group, bits, storage):
    given, exact = random_numbers(*shape, storage=storage)
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
    panels = quantized(random_numbers(*shape)[0], layout)
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
    given, _ = random_numbers(50, 100, storage=storage)
    alone = np.full(layout.num_bytes, 255, np.uint8)
    for panel in (1, 0, 3, 2):
        quantize_panels(given[panel * 16 : panel * 16 + 16], layout, FACTOR, alone, first=panel)
    assert (alone == quantized(given, layout)).all()


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
