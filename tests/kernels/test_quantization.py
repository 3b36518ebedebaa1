"""Coding and decoding of blocks, against records that are taken apart code by code in float64."""

import hypothesis.strategies as st
import numba
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import BITS, BLOCK, PackedLayout, dequantize_blocks, quantize_blocks
from hf_hybrid_cache.kernels.vector.rotation import rotate, rotation_size
from kernels.reference import from_record, hadamard, stored

from common.soak import count, search_at_random

LARGEST = np.finfo(np.float32).max


def layout_of(transposed: bool, bits: int, dim: int, group: int = 64, is_rotated: bool = False) -> PackedLayout:
    make = PackedLayout.of_keys if transposed else PackedLayout.of_values
    return make(bits, dim, group, is_rotated)


def taken_apart(packed: np.ndarray, layout: PackedLayout, block: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Dequantize a packed block before rotation, `[64, dim]`; return it with the quantization step of each number."""
    sizes = (layout.inner, layout.lanes, layout.groups)
    codes, scales, minima = from_record(packed[block, head], sizes, layout.bits)
    group_of_lane = np.minimum(np.arange(layout.lanes) // layout.group, layout.groups - 1)
    steps = scales.T[:, group_of_lane]
    numbers = minima.T[:, group_of_lane] + steps * codes
    if layout.transposed:
        numbers, steps = numbers.T, steps.T
    return numbers[:, : layout.dim], steps[:, : layout.dim]


@pytest.mark.soak
@search_at_random(120, 2000)
@given(data=st.data())
def test_decoded_numbers_when_quantized_then_are_within_half_a_step(data: st.DataObject):
    draw = data.draw
    transposed, is_rotated = draw(st.booleans()), draw(st.booleans())
    bits, dim, group = draw(st.sampled_from(BITS)), draw(st.integers(1, 150)), draw(st.sampled_from([16, 32, 48, 64]))
    batch, heads, blocks = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    storage = draw(st.sampled_from(["float32", "bfloat16"]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = np.float32(10.0 ** draw(st.integers(-25, 25)))
    normal = generator.standard_normal((batch, heads, blocks * BLOCK, dim)).astype(np.float32)
    given_bits, exact = stored((normal + draw(st.sampled_from([0.0, 30.0]))) * size, storage)
    layout = layout_of(transposed, bits, dim, group, is_rotated)
    packed = quantize_blocks(given_bits, layout)
    assert packed.shape == (blocks, batch * heads, layout.num_bytes)
    decoded_bits = np.empty_like(given_bits)
    dequantize_blocks(packed, layout, decoded_bits)
    decoded = stored(decoded_bits, storage)[1] if storage == "float32" else bfloat16(decoded_bits)
    rotation = hadamard(dim) if is_rotated else np.eye(dim)
    for block in range(blocks):
        tokens = slice(block * BLOCK, (block + 1) * BLOCK)
        for head in range(batch * heads):
            place = (*divmod(head, heads), tokens)
            numbers, steps = taken_apart(packed, layout, block, head)
            largest = np.abs(exact[place]).max()
            assert (np.abs(exact[place] @ rotation - numbers) <= 0.501 * steps + 1e-5 * largest).all()
            rounding = 2.0**-8 if storage == "bfloat16" else 1e-5
            np.testing.assert_allclose(decoded[place], numbers @ rotation, rtol=0, atol=rounding * largest * 8)
    count("codes compared with float64")


def bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("transposed", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0, 2.0**-140, 0.1, LARGEST, -LARGEST, np.float32(1e-45)])
def test_blocks_that_are_all_the_same_come_back(transposed: bool, bits: int, value: float):
    states = np.full((1, 1, BLOCK, 64), value, np.float32)
    layout = layout_of(transposed, bits, 64)
    decoded = np.empty_like(states)
    dequantize_blocks(quantize_blocks(states, layout), layout, decoded)
    np.testing.assert_allclose(decoded, states, rtol=2**-8 if abs(value) == LARGEST else 1e-3, atol=2.0**-125)


@pytest.mark.parametrize("transposed", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_the_widest_range_there_is_comes_back_finite(transposed: bool, bits: int, share: float):
    states = (np.linspace(-1, 1, BLOCK * 64) * np.float64(LARGEST)).astype(np.float32).reshape(1, 1, BLOCK, 64)
    layout = layout_of(transposed, bits, 64)
    decoded = np.empty_like(states)
    dequantize_blocks(quantize_blocks(states, layout, share), layout, decoded)
    assert np.isfinite(decoded).all()
    half_step, cut = share / (2**bits - 1), 1 - share
    assert np.abs(decoded.astype(np.float64) - states).max() < (1.01 * max(half_step, cut) + 0.01) * float(LARGEST)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_numbers_that_are_not_finite_are_refused(bad: float, storage: str):
    states = np.zeros((1, 2, 2 * BLOCK, 64), np.float32)
    states[0, 1, 100, 5] = bad
    with pytest.raises(ValueError, match="infinite, not a number"):
        quantize_blocks(stored(states, storage)[0], layout_of(True, 4, 64))


def test_numbers_that_would_overflow_when_they_are_rotated_are_refused():
    states = np.full((1, 1, BLOCK, 64), LARGEST, np.float32)
    with pytest.raises(ValueError, match="so large that sums of them are infinite"):
        quantize_blocks(states, layout_of(True, 4, 64, is_rotated=True))


def test_states_may_lie_in_memory_in_any_order_and_there_may_be_none():
    generator = np.random.default_rng(0)
    states = generator.standard_normal((2, 3 * BLOCK, 4, 64)).astype(np.float32)
    layout = layout_of(True, 4, 64, is_rotated=True)
    seen = states.transpose(0, 2, 1, 3)
    packed = quantize_blocks(seen, layout)
    assert (packed == quantize_blocks(np.ascontiguousarray(seen), layout)).all()
    assert quantize_blocks(seen[:, :, :0], layout).shape == (0, 8, layout.num_bytes)
    decoded = np.zeros((2, 4, 5 * BLOCK, 64), np.float32)
    dequantize_blocks(packed, layout, decoded[:, :, BLOCK : 4 * BLOCK])
    assert (decoded[:, :, :BLOCK] == 0).all()
    assert (decoded[:, :, 4 * BLOCK :] == 0).all()
    assert np.abs(decoded[:, :, BLOCK : 4 * BLOCK] - seen).max() < 0.6


def test_covering_less_than_the_range_moves_only_what_is_beyond_it():
    states = np.zeros((1, 1, BLOCK, 64), np.float32)
    states[0, 0, :, 0] = np.linspace(-1, 1, BLOCK)
    layout = layout_of(True, 2, 64)
    packed = quantize_blocks(states, layout, share=0.5)
    numbers, _ = taken_apart(packed, layout, 0, 0)
    np.testing.assert_allclose(np.unique(numbers[:, 0]), [-0.5, -1 / 6, 1 / 6, 0.5], atol=0.01)


@numba.njit
def rotated_in_place(numbers: np.ndarray, dim: int, size: int) -> None:
    rotate(numbers.ctypes.data, dim, size)


@pytest.mark.parametrize("dim", [1, 2, 4, 20, 24, 64, 80, 96, 128, 192, 256])
def test_rotation_when_applied_then_equals_hadamard_and_keeps_padding(dim: int):
    numbers = np.zeros(-(-dim // 16) * 16, np.float32)
    numbers[:dim] = np.random.default_rng(dim).standard_normal(dim)
    expected = numbers[:dim] @ hadamard(dim)
    rotated_in_place(numbers, dim, rotation_size(dim))
    assert np.abs(numbers[:dim] - expected).max() <= 1e-6 * np.abs(expected).max() * dim**0.5
    assert (numbers[dim:] == 0).all()
