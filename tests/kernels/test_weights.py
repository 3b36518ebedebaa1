"""Quantized weights as kernels write and read them, whose codes are read one by one here."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import PanelLayout, dequantize_panels, factor_of, quantize_panels
from kernels.reference import from_bfloat16, stored

from common.soak import count, search_at_random

# Around panels of 16 rows, and groups of columns.
SHAPES = st.sampled_from([(1, 1), (16, 32), (17, 33), (48, 64), (50, 100), (130, 200)])
SIZES = st.integers(1, 140)
GROUPS = (32, 64, 128)
STORAGES = ("float32", "bfloat16")
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
    return stored(np.random.default_rng(seed).standard_normal(shape), storage)


def as_float(out: np.ndarray) -> np.ndarray:
    return from_bfloat16(out) if out.dtype == np.uint16 else out


@pytest.mark.soak
@search_at_random(25)
@given(
    shape=SHAPES | st.tuples(SIZES, SIZES),
    group=st.sampled_from(GROUPS),
    bits=st.sampled_from([8, 4]),
    storage=st.sampled_from(STORAGES),
    largest=st.just(4.0) | st.sampled_from([1e-42, 1e-30, 1e-3, 3e4, 3e38]),
)
def test_weight_when_quantized_then_is_within_half_a_step_of_its_code(
    shape: tuple[int, int], group: int, bits: int, storage: str, largest: float
):
    numbers = random_numbers(*shape)[0].astype(np.float64)
    numbers *= largest / np.abs(numbers).max()
    numbers[1:2], numbers[2:3] = largest, 0
    given, exact = stored(numbers, storage)
    factor, layout = factor_of(float(np.abs(exact).max())), PanelLayout(bits, *shape, group)
    panels = quantized(given, layout, factor)
    numbers, steps = taken_apart(panels, layout, factor)
    # Least and largest numbers are rounded to 11 bits.
    rounding = 2.0**-11 * np.abs(exact).max() + 2e-45
    assert (np.abs(numbers - exact) <= 0.501 * steps + rounding).all()
    for start in range(0, layout.columns, group):
        of_group = np.s_[:, start : start + group]
        half_a_step = 0.501 * np.ptp(exact[of_group], axis=1, keepdims=True) / (2**bits - 1)
        assert (np.abs(numbers - exact)[of_group] <= half_a_step + rounding).all()
    assert (numbers[2:3] == 0).all()
    # The same in panels that are coded and decoded one by one, in a matrix that has more columns.
    alone, decoded = np.full_like(panels, 255), np.full((shape[0], shape[1] + 3), 7, given.dtype)
    for panel in reversed(range(layout.panels)):
        rows = slice(panel * 16, panel * 16 + 16)
        quantize_panels(given[rows], layout, factor, alone, first=panel)
        dequantize_panels(panels, layout, factor, decoded[rows], first=panel)
    assert (alone == panels).all()
    assert (decoded[:, shape[1] :] == 7).all()
    of_type = 2.0**-8 * np.abs(numbers) if storage == "bfloat16" else 1e-6 * largest
    assert (np.abs(as_float(decoded)[:, : shape[1]] - numbers) <= of_type + 1e-38).all()
    whole = np.empty(shape, given.dtype)
    dequantize_panels(panels, layout, factor, whole)
    assert (whole == decoded[:, : shape[1]]).all()
    count("weights compared with float64")


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_up_to_the_largest_that_there_are_come_back_finite(bits: int):
    generator, largest = np.random.default_rng(0), np.finfo(np.float32).max
    # Groups of numbers that end more or less below the largest, of one sign or of both.
    below = generator.uniform(0, 2.0 ** -generator.integers(0, 24, (64, 32, 1)), (64, 32, 32))
    signs = np.sign(generator.standard_normal((64, 32, 32)) + generator.integers(-2, 3, (64, 32, 1)) * 4)
    below[..., 0] *= generator.integers(0, 2, (64, 32))
    given = (largest * (1 - below) * signs).reshape(64, 1024).astype(np.float32)
    layout, factor = PanelLayout(bits, 64, 1024, 32), factor_of(float(largest))
    decoded = np.empty_like(given)
    panels = quantized(given, layout, factor)
    dequantize_panels(panels, layout, factor, decoded)
    _, steps = taken_apart(panels, layout, factor)
    assert (np.abs(decoded.astype(np.float64) - given) <= 0.501 * steps + 2.0**-11 * largest).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("group", GROUPS)
def test_weights_that_were_made_for_four_bits_stay_what_they_are(group: int, storage: str):
    generator = np.random.default_rng(0)
    codes = generator.integers(-8, 8, (48, 4, 32))
    scales = generator.uniform(0.01, 0.1, (48, 4, 1)).astype(np.float16)
    scales = np.repeat(scales[:, :: group // 32], group // 32, axis=1)  # groups of that file, of 32 or more
    given, exact = stored((codes * scales.astype(np.float32)).reshape(48, 128), storage)
    layout = PanelLayout(4, 48, 128, group)
    numbers, _ = taken_apart(quantized(given, layout), layout)
    rounding = 2.0**-8 if storage == "bfloat16" else 2.0**-11
    assert np.abs(numbers - exact).max() <= 2 * rounding * np.abs(exact).max()
