"""Numbers at addresses, float32 or bfloat16: making arrays of tensors takes longer than a small product."""

import numba
import numpy as np

from .compiled import jit_part
from .tiles import pointer


@jit_part
def load_numbers(address, is_bfloat16, first, count, out):
    """Write some numbers, from index `first` on, to float32 `out`."""
    if is_bfloat16:
        halves = numba.carray(pointer(address, np.uint16(0)), first + count)
        for index in range(count):
            out[index] = np.uint32(np.uint32(halves[first + index]) << np.uint32(16)).view(np.float32)
    else:
        singles = numba.carray(pointer(address, np.float32(0)), first + count)
        for index in range(count):
            out[index] = singles[first + index]


@jit_part
def store_numbers(numbers, is_bfloat16, address, first, count):
    """Write some of float32 `numbers`, rounded to the nearest bfloat16, from index `first` on."""
    if is_bfloat16:
        halves = numba.carray(pointer(address, np.uint16(0)), first + count)
        for index in range(count):
            bits = np.float32(numbers[index]).view(np.uint32)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            # Of what is not a number, rounding might make one.
            kept = rounded if numbers[index] == numbers[index] else bits | np.uint32(0x400000)
            halves[first + index] = np.uint16(kept >> np.uint32(16))
    else:
        singles = numba.carray(pointer(address, np.float32(0)), first + count)
        for index in range(count):
            singles[first + index] = numbers[index]


@jit_part
def clear_numbers(is_bfloat16, address, count):
    """Write zeros."""
    halves = numba.carray(pointer(address, np.uint16(0)), count if is_bfloat16 else 2 * count)
    halves[:] = 0
