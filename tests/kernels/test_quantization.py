"""Coding and decoding of blocks, against records that are taken apart code by code in float64."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import BITS, BLOCK, PackedLayout, dequantize_blocks, quantize_blocks
from kernels.reference import from_bfloat16, from_record, hadamard, stored

from common.soak import count, search_at_random

LARGEST = np.finfo(np.float32).max


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
    draw, make = data.draw, data.draw(st.sampled_from([PackedLayout.of_keys, PackedLayout.of_values]))
    dim, group = draw(st.integers(1, 150)), draw(st.sampled_from([16, 32, 48, 64]))
    batch, heads, blocks = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape, form = (batch, heads, blocks * BLOCK, dim), draw(st.sampled_from(["normal", "normal", "equal", "widest"]))
    is_rotated, share = form != "widest" and draw(st.booleans()), 1.0
    if form == "normal":
        numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).standard_normal(shape)
        numbers = (numbers + draw(st.sampled_from([0.0, 30.0]))) * 10.0 ** draw(st.integers(-25, 25))
    elif form == "equal":
        numbers = np.full(shape, draw(st.sampled_from([0.0, -0.0, 1.0, -3.0, 0.1, 1e38, 2.0**-140, 1e-45])))
    else:  # numbers beyond the share get the nearest code
        numbers, share = LARGEST * np.linspace(-1, 1, np.prod(shape)).reshape(shape), draw(st.sampled_from([1.0, 0.8]))
    storage = draw(st.sampled_from(["float32", "bfloat16"]))
    given_bits, exact = stored(numbers, storage)
    layout = make(draw(st.sampled_from(BITS)), dim, group, is_rotated)
    packed = quantize_blocks(given_bits, layout, share)
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
            # Of numbers up to the largest that there is, the minimum is rounded up, which costs the lowest ones.
            slack = 1e-5 if form != "widest" else 2.0**-7 + 1 - share
            error = np.abs(exact[place] @ rotation - numbers)
            assert (error <= 0.501 * steps + slack * largest + 2.0**-125).all()
            rounding = 2.0**-8 if storage == "bfloat16" else 1e-5
            np.testing.assert_allclose(
                decoded[place], numbers @ rotation, rtol=0, atol=rounding * largest * 8 + 2.0**-125
            )
    count("codes compared with float64")


def test_numbers_that_would_overflow_when_they_are_rotated_are_refused():
    states = np.full((1, 1, BLOCK, 64), LARGEST, np.float32)
    with pytest.raises(ValueError, match="so large that sums of them are infinite"):
        quantize_blocks(states, PackedLayout.of_keys(4, 64, 64, is_rotated=True))


def test_a_part_of_a_tensor_is_decoded_in_place_and_the_rest_stays():
    states = np.random.default_rng(0).standard_normal((2, 4, 3 * BLOCK, 64)).astype(np.float32)
    layout = PackedLayout.of_keys(4, 64, 64, is_rotated=True)
    decoded = np.zeros((2, 4, 5 * BLOCK, 64), np.float32)
    part = decoded[:, :, BLOCK : 4 * BLOCK]
    dequantize_blocks(quantize_blocks(states, layout), layout, part)
    assert np.abs(part - states).max() < 0.6
    part[:] = 0
    assert (decoded == 0).all()
