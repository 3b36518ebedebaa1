"""The index of keys against codes that are made one by one in float64."""

import numpy as np
import pytest
import torch

from hf_hybrid_cache.kernels import index_bytes, quantize_index
from kernels.reference import dequantized_index, hadamard, stored


def made(keys: np.ndarray) -> np.ndarray:
    """Quantize keys `[batch, heads, tokens, dim]` into an index, and return its dequantized values."""
    batch, heads, tokens, dim = keys.shape
    packed = np.full((tokens // 64, batch * heads, index_bytes(dim)), 0xFF, np.uint8)
    quantize_index(keys, packed)
    return dequantized_index(packed, dim).reshape(keys.shape)


def expected(keys: np.ndarray) -> np.ndarray:
    dim = keys.shape[3]
    matrix = hadamard(dim)
    blocks = keys.astype(np.float64).reshape(*keys.shape[:2], -1, 64, dim) @ matrix
    means = torch.from_numpy(blocks.mean(axis=3, keepdims=True)).bfloat16().double().numpy()
    left = blocks - means
    step = 0.9957 * np.sqrt(np.square(left).mean(axis=4, keepdims=True))
    codes = np.clip(np.floor(left / step + 2), 0, 3) - 1.5
    scale = (left * codes).sum(axis=4, keepdims=True) / np.square(codes).sum(axis=4, keepdims=True)
    return ((means + scale * codes) @ matrix.T).reshape(keys.shape)


@pytest.mark.parametrize("dim", [1, 12, 24, 64, 80, 128, 256])
def test_what_an_index_stands_for_is_what_its_description_says(dim: int):
    keys = np.random.default_rng(dim).standard_normal((2, 3, 192, dim)).astype(np.float32) + 3
    found, wanted = made(keys), expected(keys)
    # A number between two codes may get either, which moves all channels that are rotated together.
    is_same = np.abs(found - wanted).max(axis=3) < 0.05
    assert is_same.mean() > 0.99


def test_index_error_when_keys_are_normal_then_is_that_of_best_2_bit_codes():
    keys = np.random.default_rng(0).standard_normal((1, 2, 1024, 64)).astype(np.float32)
    error = np.square(made(keys) - keys).mean()
    assert 0.10 < error < 0.13  # 0.1188 of the best uniform codes (Max, 1960)


def test_index_when_keys_share_a_mean_then_loses_nothing_to_it():
    keys = np.random.default_rng(0).standard_normal((1, 2, 1024, 64)).astype(np.float32)
    far = keys + 100 * np.random.default_rng(1).standard_normal((1, 2, 1, 64)).astype(np.float32)
    error = np.square(made(far) - far).mean()
    assert error < 0.13 + np.square(200 / 256)  # and the rounding of means to bfloat16


def test_bfloat16_bits_and_strides_are_read():
    keys = np.random.default_rng(0).standard_normal((1, 128, 3, 64)).astype(np.float32)
    bits, exact = stored(keys, "bfloat16")
    np.testing.assert_array_equal(made(bits.swapaxes(1, 2)), made(exact.astype(np.float32).swapaxes(1, 2)))


def test_equal_keys_are_kept_as_their_mean():
    keys = np.full((1, 1, 64, 16), 2.5, np.float32)
    np.testing.assert_allclose(made(keys), 2.5, rtol=4e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_key_that_is_not_finite_makes_its_block_not_a_number(bad: float):
    keys = np.random.default_rng(0).standard_normal((1, 2, 128, 64)).astype(np.float32)
    keys[0, 1, 100, 7:9] = bad
    found = made(keys)
    assert np.isnan(found[0, 1, 64:]).any(axis=-1).all()
    assert np.isfinite(found[0, 0]).all()
    assert np.isfinite(found[0, 1, :64]).all()


def test_index_when_there_are_no_blocks_then_is_empty():
    quantize_index(np.empty((1, 2, 0, 64), np.float32), np.empty((0, 2, index_bytes(64)), np.uint8))
