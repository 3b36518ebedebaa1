"""
Orthogonal rotation of keys and values, so that what is coded has no outlying channels (QuaRot, arXiv:2404.00456).

The Hadamard transform is its own inverse: a query that is rotated like the keys gives the same scores, and what is
summed up of rotated values is rotated back once.
"""

import numpy as np

from .compiled import jit_part


def rotation_size(dim: int) -> int:
    """Numbers that are rotated together: the largest power of two that divides `dim`."""
    return dim & -dim


@jit_part
def rotate(numbers, dim, size):
    """Rotate runs of `size` of the first `dim` numbers, in place."""
    half = 1
    while half < size:
        for start in range(0, dim, 2 * half):
            for index in range(start, start + half):
                a, b = numbers[index], numbers[index + half]
                numbers[index], numbers[index + half] = a + b, a - b
        half *= 2
    factor = 1 / np.sqrt(size)
    for index in range(dim):
        numbers[index] *= factor


@jit_part
def rotate_back(numbers, dim, size, mixing):
    """Undo what was done to values: `rotate`, and then multiply by `mixing`, `[dim, dim]`, if it is not empty."""
    rotate(numbers, dim, size)
    if mixing.size:
        mixed = np.zeros(dim, np.float32)
        for row in range(dim):
            number = np.float32(numbers[row])
            for column in range(dim):
                mixed[column] += number * mixing[row, column]
        for column in range(dim):
            numbers[column] = mixed[column]


@jit_part
def rotate_columns(tile, dim, size):
    """Likewise each column of a tile, whose first `dim` rows are what is rotated."""
    half = 1
    while half < size:
        for start in range(0, dim, 2 * half):
            for index in range(start, start + half):
                for lane in range(tile.shape[1]):
                    a, b = tile[index, lane], tile[index + half, lane]
                    tile[index, lane], tile[index + half, lane] = a + b, a - b
        half *= 2
    factor = np.float32(1 / np.sqrt(size))
    for index in range(dim):
        for lane in range(tile.shape[1]):
            tile[index, lane] *= factor
