"""Coding and decoding of blocks, against records that are taken apart code by code in float64."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import BITS, BLOCK, PackedLayout, dequantize_blocks, quantize_blocks
from kernels.reference import from_bfloat16, from_record, hadamard, stored

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
@search_at_random(24)
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
    decoded = decoded_bits.astype(np.float64) if storage == "float32" else from_bfloat16(decoded_bits)
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


ROLES_AND_BITS = pytest.mark.parametrize(
    ("transposed", "bits"), [(role, bits) for role in (True, False) for bits in BITS]
)


def there_and_back(states: np.ndarray, layout: PackedLayout, share: float = 1.0) -> np.ndarray:
    decoded = np.empty_like(states)
    dequantize_blocks(quantize_blocks(states, layout, share), layout, decoded)
    return decoded


@ROLES_AND_BITS
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0, 2.0**-140, 0.1, LARGEST, -LARGEST, np.float32(1e-45)])
def test_blocks_that_are_all_the_same_come_back(transposed: bool, bits: int, value: float):
    states = np.full((1, 1, BLOCK, 64), value, np.float32)
    decoded = there_and_back(states, layout_of(transposed, bits, 64))
    np.testing.assert_allclose(decoded, states, rtol=2**-8 if abs(value) == LARGEST else 1e-3, atol=2.0**-125)


@ROLES_AND_BITS
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_the_widest_range_there_is_comes_back_finite(transposed: bool, bits: int, share: float):
    states = (np.linspace(-1, 1, BLOCK * 64) * np.float64(LARGEST)).astype(np.float32).reshape(1, 1, BLOCK, 64)
    decoded = there_and_back(states, layout_of(transposed, bits, 64), share)
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


def test_a_part_of_a_tensor_is_decoded_in_place_and_the_rest_stays():
    states = np.random.default_rng(0).standard_normal((2, 4, 3 * BLOCK, 64)).astype(np.float32)
    layout = layout_of(True, 4, 64, is_rotated=True)
    decoded = np.zeros((2, 4, 5 * BLOCK, 64), np.float32)
    part = decoded[:, :, BLOCK : 4 * BLOCK]
    dequantize_blocks(quantize_blocks(states, layout), layout, part)
    assert np.abs(part - states).max() < 0.6
    part[:] = 0
    assert (decoded == 0).all()
