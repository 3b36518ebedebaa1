"""
Operands: a block of keys or values in the form that products with many query rows read.

An operand is float32, or pairs of bfloat16 if the processor multiplies those (`tiles.score_pairs`). It is made once for
hundreds of rows.
"""

import numpy as np

from ..forms.blocks import in_words
from ..vector.compiled import jit_function
from ..vector.intrinsics import is_packed, widen
from ..vector.numbers_at import array_at, bfloat16_at, floats_at, rounded_to_upper_half


@jit_function
def unpacked_or_packed(element, source, rows, columns, filled_rows, target):
    """
    Write the first rows of a block of `element`, `[rows, columns]`, as an operand, with zeros up to `filled_rows`.

    source, target: addresses; filled_rows: an even number.
    """
    if is_packed(element):
        _pack(source, rows, columns, filled_rows, target)
        return
    widen(element, source, rows * columns, target)
    rest = floats_at(target + rows * columns * 4, (filled_rows - rows) * columns)
    for index in range(rest.size):
        rest[index] = 0


@jit_function
def _pack(source, rows, columns, filled_rows, target):
    for row in range(0, filled_rows, 2):
        first = array_at(source + row * columns * 2, columns, np.uint16(0))
        second = array_at(source + (row + 1) * columns * 2, columns, np.uint16(0))
        pairs = array_at(target + row * columns * 2, columns, np.uint32(0))
        if row + 1 < rows:
            for column in range(columns):
                pairs[column] = np.uint32(first[column]) | np.uint32(np.uint32(second[column]) << np.uint32(16))
        elif row < rows:
            for column in range(columns):
                pairs[column] = first[column]
        else:
            for column in range(columns):
                pairs[column] = 0


@jit_function
def dequantized(element, packed_block, form, target):
    """
    Dequantize a packed block, `[inner, lanes]`, to an operand of the same form as those of `element`.

    packed_block, target: addresses; form: its `PackedLayout`.
    """
    bits, lanes = form.bits, form.lanes
    scales = packed_block + form.scales
    minima = scales + form.minima
    for index in range(0, form.inner, 2):
        for number in range(form.groups):
            start, size = number * form.group, min(form.group, lanes - number * form.group)
            at = (number * form.inner + index) * 2
            first = _codes(packed_block, index, bits, lanes, start)
            second = _codes(packed_block, index + 1, bits, lanes, start)
            parts = (
                bfloat16_at(scales + at),
                bfloat16_at(minima + at),
                bfloat16_at(scales + at + 2),
                bfloat16_at(minima + at + 2),
            )
            if is_packed(element):
                _dequantize_pairs(first, second, bits, size, parts, target + (index // 2 * lanes + start) * 4)
            else:
                place = target + (index * lanes + start) * 4
                _dequantize(first, bits, size, parts[0], parts[1], place)
                _dequantize(second, bits, size, parts[2], parts[3], place + lanes * 4)


@jit_function
def _codes(packed_block, index, bits, lanes, start):
    """The address of the words that hold the codes of an index, from a lane on, and the lowest bit of the codes."""
    word, position = in_words(index, bits)
    return packed_block + (word * lanes + start) * 4, position


@jit_function
def _dequantize(codes, bits, size, scale, minimum, target):
    address, position = codes
    words, numbers = array_at(address, size, np.uint32(0)), floats_at(target, size)
    mask = np.uint32((1 << bits) - 1)
    for lane in range(size):
        code = np.uint32(words[lane] >> position) & mask
        numbers[lane] = minimum + scale * np.float32(np.int32(code))


@jit_function
def _dequantize_pairs(first, second, bits, size, parts, target):
    (first_address, first_position), (second_address, second_position) = first, second
    first_scale, first_minimum, second_scale, second_minimum = parts
    first_words, second_words = (
        array_at(first_address, size, np.uint32(0)),
        array_at(second_address, size, np.uint32(0)),
    )
    pairs = array_at(target, size, np.uint32(0))
    mask = np.uint32((1 << bits) - 1)
    for lane in range(size):
        first_code = np.uint32(first_words[lane] >> first_position) & mask
        second_code = np.uint32(second_words[lane] >> second_position) & mask
        a = np.float32(first_minimum + first_scale * np.float32(np.int32(first_code))).view(np.uint32)
        b = np.float32(second_minimum + second_scale * np.float32(np.int32(second_code))).view(np.uint32)
        upper = np.uint32(np.uint32(rounded_to_upper_half(b)) << np.uint32(16))
        pairs[lane] = np.uint32(rounded_to_upper_half(a)) | upper
