"""
The interpreter of rows: instructions in memory, one after the other, on the numbers of one row.

Numbers become vectors of float32 in a buffer, are computed there, and go to where they belong, a chunk at a time; where
they lie in memory as vectors of float32 already, they stay there. All numbers of a row are in the caches, so passes
over them cost little, and code for each instruction is needed once, not for each way in which its numbers may lie.
"""

from typing import NamedTuple

import numpy as np

from ..attention.attention_call import AttentionCall, row_bytes, scratch_at, stored_at, take_ranges, take_rows
from ..vector.compiled import jit, jit_exact, jit_function
from ..vector.intrinsics import call_at
from ..vector.numbers_at import (
    Numbers,
    array_at,
    bfloat16_at,
    floats_at,
    integers_at,
    load_numbers,
    store_numbers,
)
from ..vector.vector_ir import BLOCK, CACHE_LINE, LANES
from ..weights.products import Product, multiply_part, take_tokens
from .arithmetic import CODES, begin_reduction, compute, reduce

# Numbers that are computed at a time; buffers of them, of three operands and a result, fit the first-level cache.
CHUNK = 1024
_BUFFER_BYTES = 4 * CHUNK
# Of a row: the sixteen floats of a reduction, the places of operands, and the buffers.
WORK_BYTES = 2 * CACHE_LINE + 4 * _BUFFER_BYTES
# How numbers lie: as vectors of float32 that follow each other; one number for all; or otherwise.
VECTORS, ONE, APART = range(3)
# Codes of what a row does beside `CODES`.
TAKE_TOKENS, TAKE_STATES = len(CODES), len(CODES) + 1
_COPY, _MEAN, _FIRST_REDUCTION = CODES["copy"], CODES["mean"], CODES["sum"]


class Rows(NamedTuple):
    """Instructions for rows: `count` of `Code`, one after the other."""

    codes: int  # address
    count: int
    work: int  # address of memory to work in, `WORK_BYTES` for each row


class Code(NamedTuple):
    """
    An instruction; as many of `Array` follow it: of an instruction on numbers the result's, then the operands'.

    Numbers are lines of columns. Lines have three dimensions, of which the sizes of the last two are given.
    """

    code: int
    arrays: int
    columns: int
    lines: int
    second: int
    third: int
    lines_at_once: int
    call: int  # address: of the `Product` of `TAKE_TOKENS`, or of the first `AttentionCall` of `TAKE_STATES`


class Array(NamedTuple):
    """Numbers of each row; steps are in bytes."""

    address: int  # in row 0
    row_bytes: int
    is_bfloat16: int
    form: int
    step: int  # from a column to the next
    first_step: int  # of the three dimensions of lines
    second_step: int
    third_step: int


CODE_BYTES, ARRAY_BYTES = 8 * len(Code._fields), 8 * len(Array._fields)


class ProductList(NamedTuple):
    """Products that are made together: their parts follow each other."""

    first: int  # address of the first `Product`
    count: int


PRODUCT_BYTES = 8 * len(Product._fields)


@jit
def multiply(part, call):
    """Make a part of a list of products."""
    given = call_at(call, ProductList)
    address = given.first
    last = address + (given.count - 1) * PRODUCT_BYTES
    while address < last and part >= call_at(address, Product).parts:
        part -= call_at(address, Product).parts
        address += PRODUCT_BYTES
    multiply_part(part, address)


@jit
def run_rows(row, call):
    """Run the instructions for a row."""
    given = call_at(call, Rows)
    address, work = given.codes, given.work + row * WORK_BYTES
    for _ in range(given.count):
        code = call_at(address, Code)
        if code.code < _FIRST_REDUCTION:
            _compute(row, address, work)
        elif code.code < TAKE_TOKENS:
            _reduce(row, address, work)
        elif code.code == TAKE_TOKENS:
            take_tokens(row, code.call)
        else:
            _take_states(row, address)
        address += CODE_BYTES + code.arrays * ARRAY_BYTES


@jit_exact
def _compute(row, address, work):
    """Run an instruction element by element: as many lines at a time as there is room for, or a part of a line."""
    code, out = call_at(address, Code), call_at(address + CODE_BYTES, Array)
    buffers, places = work + 2 * CACHE_LINE, work + CACHE_LINE
    for line in range(0, code.lines, code.lines_at_once):
        lines = min(code.lines_at_once, code.lines - line)
        for column in range(0, code.columns, CHUNK):
            count = min(CHUNK, code.columns - column)
            vectors = lines * ((count + LANES - 1) // LANES)
            result = buffers
            if out.form == VECTORS:
                result = out.address + row * out.row_bytes + (line * code.columns + column) * 4
            for which in range(1, code.arrays):
                # A copy needs no buffer between.
                target = result if code.code == _COPY else buffers + which * _BUFFER_BYTES
                array = call_at(address + CODE_BYTES + which * ARRAY_BYTES, Array)
                place = _operand(row, array, address, line, lines, column, count, target)
                taken = integers_at(places + (which - 1) * 16, 2)
                taken[0], taken[1] = place, 0 if array.form == ONE else CACHE_LINE
            place, step = integers_at(places, 2)
            if code.code == _COPY and step and (out.form != VECTORS or place == result):
                result = place
            else:
                compute(code.code, places, result, vectors)
            if out.form != VECTORS:
                _write_lines(row, out, address, line, lines, column, count, result)


@jit_function
def _operand(row, array, address, line, lines, column, count, target):
    """The address of vectors of an operand: where they lie, or at `target`."""
    start = array.address + row * array.row_bytes
    if array.form == VECTORS:
        return start + (line * call_at(address, Code).columns + column) * 4
    if array.form == ONE:
        floats_at(target, LANES)[:] = _number_at(start, array.is_bfloat16)
        return target
    width = (count + LANES - 1) // LANES * LANES * 4
    for index in range(lines):
        place = start + _line_offset(array, address, line + index) + column * array.step
        numbers = floats_at(target + index * width, count)
        if array.step == (2 if array.is_bfloat16 else 4):
            load_numbers(Numbers(place, array.is_bfloat16), 0, count, numbers)
        elif array.step:
            for which in range(count):
                numbers[which] = _number_at(place + which * array.step, array.is_bfloat16)
        else:
            numbers[:] = _number_at(place, array.is_bfloat16)
    return target


@jit_function
def _write_lines(row, out, address, line, lines, column, count, source):
    """Write lines of a result from a buffer to where they belong, rounded to its kind."""
    start, width = out.address + row * out.row_bytes, (count + LANES - 1) // LANES * LANES * 4
    for index in range(lines):
        place = start + _line_offset(out, address, line + index) + column * out.step
        numbers = floats_at(source + index * width, count)
        if out.step == (2 if out.is_bfloat16 else 4):
            store_numbers(numbers, Numbers(place, out.is_bfloat16), 0, count)
        else:
            for which in range(count):
                number = floats_at(source + index * width + which * 4, 1)
                store_numbers(number, Numbers(place + which * out.step, out.is_bfloat16), 0, 1)


@jit_function
def _line_offset(array, address, line):
    """Bytes from the first line of an array to another one."""
    code = call_at(address, Code)
    if code.second == 1 and code.third == 1:
        return line * array.first_step
    rest, third = divmod(line, code.third)
    first, second = divmod(rest, code.second)
    return first * array.first_step + second * array.second_step + third * array.third_step


@jit_function
def _number_at(place, is_bfloat16):
    return bfloat16_at(place) if is_bfloat16 else floats_at(place, 1)[0]


@jit_exact
def _reduce(row, address, work):
    """Run a reduction, line by line."""
    code, out = call_at(address, Code), call_at(address + CODE_BYTES, Array)
    array, buffer = call_at(address + CODE_BYTES + ARRAY_BYTES, Array), work + 2 * CACHE_LINE
    for line in range(code.lines):
        result = first = begin_reduction(code.code, work)
        for column in range(0, code.columns, CHUNK):
            count = min(CHUNK, code.columns - column)
            if count % LANES:
                floats_at(buffer + count // LANES * CACHE_LINE, LANES)[:] = first
            place = _operand(row, array, address, line, 1, column, count, buffer)
            result = reduce(code.code, place, (count + LANES - 1) // LANES, work)
        if code.code == _MEAN:
            result /= np.float32(code.columns)
        floats_at(work, 1)[0] = result
        place = out.address + row * out.row_bytes + _line_offset(out, address, line)
        store_numbers(floats_at(work, 1), Numbers(place, out.is_bfloat16), 0, 1)


@jit_function
def _take_states(row, address):
    """Bring a row's keys and values, lines of `Array`, to the cache, and its queries to attention."""
    call = call_at(address, Code).call
    while call:
        asked, stored = call_at(call, AttentionCall), stored_at(call)
        if 0 <= row - asked.first_row < stored.heads // stored.num_kv_heads * asked.query_length:
            _take_states_of(row, call, address)
        call = asked.following


@jit_function
def _take_states_of(row, call, address):
    """Bring a row's states to one call of attention."""
    code = call_at(address, Code)
    asked, stored, scratch = call_at(call, AttentionCall), stored_at(call), scratch_at(call)
    sequence, index = divmod(row - asked.first_row, asked.query_length)
    position = stored.num_tokens - asked.query_length + index
    block, token = divmod(position - stored.quantized_blocks * BLOCK, BLOCK)
    operand_bytes = row_bytes(asked.operand_is_bfloat16, call)
    rotated_bytes = row_bytes(asked.rotated_is_bfloat16, call)
    for kv_head in range(code.lines):
        head = sequence * code.lines + kv_head
        if code.arrays and not asked.is_prefix:
            keys, values = (call_at(address + CODE_BYTES, Array), call_at(address + CODE_BYTES + ARRAY_BYTES, Array))
            item, place = 2 if keys.is_bfloat16 else 4, block * stored.heads + head
            key = stored.keys + place * stored.key_bytes + token * item
            value = stored.values + place * stored.value_bytes + token * stored.width * item
            _scatter(row, keys, kv_head, stored.key_dim, key, BLOCK * item)
            _scatter(row, values, kv_head, stored.value_dim, value, item)
        for group in range(asked.group):
            of_head = group * asked.query_length + index
            place = head * asked.rows_at_once + of_head
            operand, rotated = scratch.operand + place * operand_bytes, scratch.rotated + place * rotated_bytes
            take_rows(head, of_head, 1, operand, rotated, call)
            # Rows that fill up the last tile see what the last one sees.
            filled = asked.rows_at_once - of_head if of_head == asked.rows - 1 else 1
            take_ranges(head, of_head, filled, scratch.ranges + place * 16, call)


@jit_function
def _scatter(row, array, head, dim, out, step):
    """Copy the numbers of a head to places `step` bytes apart."""
    source = array.address + row * array.row_bytes + head * array.first_step
    if array.is_bfloat16:
        for index in range(dim):
            given = array_at(source + index * array.step, 1, np.uint16(0))
            array_at(out + index * step, 1, np.uint16(0))[0] = given[0]
    else:
        for index in range(dim):
            floats_at(out + index * step, 1)[0] = floats_at(source + index * array.step, 1)[0]
