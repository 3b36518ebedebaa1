"""Rotations against the matrix that they are a product with."""

import numba
import numpy as np
import pytest

from hf_hybrid_cache.kernels.vector.rotation import rotate, rotation_size


@numba.njit
def _rotate(numbers: np.ndarray, dim: int, size: int) -> None:
    rotate(numbers.ctypes.data, dim, size)


def _matrix(dim: int, size: int) -> np.ndarray:
    """Return Hadamard's matrix by Sylvester's construction, for each `size` numbers of `dim`."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return np.kron(np.eye(dim // size), matrix / np.sqrt(size))


@pytest.mark.parametrize("dim", [1, 2, 4, 20, 24, 64, 80, 96, 128, 192, 256])
def test_rotation_when_applied_then_equals_hadamard_and_keeps_padding(dim: int) -> None:
    size, filled = rotation_size(dim), -(-dim // 16) * 16
    numbers = np.zeros(filled, np.float32)
    numbers[:dim] = np.random.default_rng(dim).standard_normal(dim)
    expected = numbers[:dim] @ _matrix(dim, size)

    _rotate(numbers, dim, size)

    assert np.abs(numbers[:dim] - expected).max() <= 1e-6 * np.abs(expected).max() * dim**0.5
    assert np.all(numbers[dim:] == 0)
