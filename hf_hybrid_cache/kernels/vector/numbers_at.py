"""Numbers at addresses, float32 or bfloat16. Making an array of a tensor takes longer than a small product."""

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .compiled import jit_function, jit_inlined
from .intrinsics import pointer
from .vector_ir import FLOATS


class Numbers(NamedTuple):
    """The address of numbers, and their type: bfloat16 or float32."""

    address: int
    is_bfloat16: bool


@jit_inlined
def array_at(address, shape, one):
    """An array of numbers of the type of `one`. A slice of an array would be counted, by atomic instructions."""
    return numba.carray(pointer(address, one), shape)


@jit_inlined
def floats_at(address, shape):
    return array_at(address, shape, np.float32(0))


@jit_inlined
def integers_at(address, shape):
    return array_at(address, shape, np.int64(0))


@jit_function
def keep(array):
    """Keep an array alive until here: Numba frees it after its last use, even if its address is still in use."""
    return array.size


@jit_function
def as_number(bits):
    """The float32 that has these bits."""
    return np.uint32(bits).view(np.float32)


@jit_function
def as_double(bits):
    """The float64 that a call holds as these bits."""
    return np.int64(bits).view(np.float64)


def bits_of_double(number: float) -> int:
    """The bits by which a call holds a float64, see `as_double`."""
    return int(np.float64(number).view(np.int64))


@jit_function
def bfloat16_at(address):
    """The bfloat16 at an address, as float32."""
    return as_number(np.uint32(array_at(address, 1, np.uint16(0))[0]) << np.uint32(16))


@jit_function
def rounded_to_upper_half(bits):
    """The bits of the nearest bfloat16, given those of a float32; of two, the even one."""
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16


@jit_function
def address_of(numbers, index):
    """The address of one number."""
    return numbers.address + index * (2 if numbers.is_bfloat16 else 4)


@jit_function
def load_numbers(numbers, first, count, out):
    """Write `count` numbers, from index `first` on, to float32 `out`."""
    address = address_of(numbers, first)
    if numbers.is_bfloat16:
        halves = array_at(address, count, np.uint16(0))
        for index in range(count):
            out[index] = as_number(np.uint32(halves[index]) << np.uint32(16))
    else:
        singles = floats_at(address, count)
        for index in range(count):
            out[index] = singles[index]


@jit_function
def store_numbers(given, numbers, first, count):
    """Write the first `count` of float32 `given` from index `first` on, rounded to bfloat16 if the numbers are that."""
    address = address_of(numbers, first)
    if numbers.is_bfloat16:
        halves = array_at(address, count, np.uint16(0))
        for index in range(count):
            bits = np.float32(given[index]).view(np.uint32)
            # Rounding could turn NaN into infinity.
            is_number = given[index] == given[index]
            halves[index] = rounded_to_upper_half(bits) if is_number else (bits | np.uint32(0x400000)) >> np.uint32(16)
    else:
        singles = floats_at(address, count)
        for index in range(count):
            singles[index] = given[index]


@intrinsic
def store_sixteen(typing_context: Any, given: Any, factor: Any, bias: Any, is_bfloat16: Any, out: Any) -> Any:
    """
    Write sixteen numbers `given * factor + bias`, as bfloat16 or float32.

    given, bias: addresses of float32 `[LANES]`; factor: float32; out: address.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        given, factor, bias, is_bfloat16, out = arguments
        given, bias = (vec.load(builder, each, FLOATS) for each in (given, bias))
        result = vec.multiply_add(builder, given, vec.splat(builder, factor), bias)
        vec.of_either_type(builder, is_bfloat16, lambda kind: vec.store_as(builder, result, kind, out))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.boolean, types.int64), generate


@jit_function
def clear_numbers(numbers, count):
    """Write `count` zeros."""
    array_at(numbers.address, count if numbers.is_bfloat16 else 2 * count, np.uint16(0))[:] = 0
