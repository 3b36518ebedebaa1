"""
Attention of many queries over blocks in host memory: a prompt, a chunk of one, drafts to verify, beams.

Attention of few queries (`attention`) is bound by memory; attention of many queries is bound by arithmetic. Hundreds of
rows of one KV head take all blocks that one of them sees, with a running maximum (FlashAttention, arXiv:2205.14135).
Each block, float or quantized, becomes an operand once for all these rows: float32, or pairs of bfloat16 if the
processor multiplies those (`tiles.score_pairs`).
"""

import numba
import numpy as np

from ..forms.blocks import in_words
from ..vector.compiled import Needed, jit, jit_function
from ..vector.intrinsics import call_at, is_float32, is_packed, widen
from ..vector.numbers_at import array_at, bfloat16_at, floats_at, rounded_to_upper_half
from ..vector.parallel import split_work_to
from ..vector.tiles import (
    ROWS,
    score,
    score_pairs,
    softmax_pairs,
    softmax_tile,
    weigh,
    weigh_pairs,
)
from ..vector.vector_ir import BLOCK
from .attention import has_mask
from .attention_call import (
    AttentionCall,
    PartialResults,
    cap_tile,
    key_layout,
    mask_tile,
    merge_rows,
    reset_rows,
    row_bytes,
    score_factor,
    scratch_at,
    shows,
    stored_at,
    take_ranges,
    take_rows,
    value_layout,
)


@jit
def attend_prefill(team, address, element):
    """Attend as an `AttentionCall` says to blocks of the type of `element`, on several threads, see `split_work`."""
    split_work_to(team, call_at(address, AttentionCall).parts, _attend_part, (element, address))


@jit_function
def _attend_part(part, thread, work):
    """
    Attend with some rows of a head.

    Parts of one head follow each other, so that its blocks stay in a cache of the processor. The last rows of a head
    see most tokens; they come first, so that all threads end at about the same time.
    """
    element, address = work
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    parts = (call.rows + call.rows_at_once - 1) // call.rows_at_once
    head, first = part // parts, (parts - 1 - part % parts) * call.rows_at_once
    count, memory = min(call.rows_at_once, call.rows - first), thread * scratch.part_bytes
    sides, padded = 2 if stored.quantized_blocks else 1, (count + ROWS - 1) // ROWS * ROWS
    maxima, sums, partial = scratch.maxima + memory, scratch.sums + memory, scratch.partial + memory
    # Rows beyond the end are the last one once more: what the memory held before might be slow to multiply.
    take_rows(head, first, padded, scratch.operand + memory, scratch.rotated + memory, address)
    for side in range(sides):
        beside = side * scratch.side_bytes
        reset_rows(0, padded, maxima + beside, sums + beside, partial + beside, stored.width)
    begin, end = take_ranges(head, first, padded, scratch.ranges + memory, address)
    for block in range(begin // BLOCK, (end + BLOCK - 1) // BLOCK):
        _attend_block(element, block, head, first, padded, memory, address)
    own = PartialResults(sides, sides - 1, maxima, sums, partial, scratch.side_bytes)
    merge_rows(head, first, count, own, address)


@jit_function
def _attend_block(element, block, head, first, padded, memory, address):
    """Attend to a block with `padded` rows, from `first` on."""
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    start, one = block * BLOCK, numba.float32(1)
    tokens = min(BLOCK, stored.num_tokens - start)
    keys, values, inner, side = _operands(element, block, head, tokens, memory, address)
    is_rotated = stored.quantized_blocks > 0 and side == 0
    queries = memory + (scratch.rotated if is_rotated else scratch.operand)
    stride = row_bytes(call.rotated_is_bfloat16 if is_rotated else call.operand_is_bfloat16, address)
    scores, corrections, beside = scratch.scores + memory, scratch.corrections + memory, side * scratch.side_bytes
    for row in range(0, padded, ROWS):
        ranges = scratch.ranges + memory + row * 16
        is_seen, is_whole = shows(ranges, start)
        if not is_seen:
            continue
        query, factor = queries + row * stride, score_factor(address)
        if is_packed(element):
            score_pairs(query, stride, keys, inner // 2, scores)
        else:
            score(one, query, stride, keys, inner, scores, keys)
        if call.cap:
            cap_tile(scores, factor, address)
            factor = one
        if not is_whole or has_mask(address):
            mask_tile(head, first + row, start, ranges, scores, factor, address)
            factor = one
        state = memory + beside + row * 4
        maxima, sums = scratch.maxima + state, scratch.sums + state
        partial = scratch.partial + memory + beside + row * stored.width * 4
        if is_packed(element):
            softmax_pairs(scores, factor, maxima, sums, corrections)
            weigh_pairs(scores, values, (tokens + 1) // 2, stored.width, corrections, partial)
        else:
            softmax_tile(scores, factor, maxima, sums, corrections)
            weigh(one, scores, values, tokens, stored.width, corrections, partial, values)


@jit_function
def _operands(element, block, head, tokens, memory, address):
    """Make a block's operands. Returns those of keys and values, the channels of keys, and the side of the results."""
    stored, scratch = stored_at(address), scratch_at(address)
    keys, values = scratch.key_operand + memory, scratch.value_operand + memory
    quantized = block - stored.first_quantized
    if 0 <= quantized < stored.quantized_blocks:
        item = quantized * stored.heads + head
        of_keys, of_values = key_layout(address), value_layout(address)
        dequantized(element, stored.packed_keys + item * of_keys.num_bytes, of_keys, keys)
        dequantized(element, stored.packed_values + item * of_values.num_bytes, of_values, values)
        return keys, values, stored.inner, 0
    side = 1 if stored.quantized_blocks else 0
    item = (block if quantized < 0 else block - stored.quantized_blocks) * stored.heads + head
    keys_from, values_from = stored.keys + item * stored.key_bytes, stored.values + item * stored.value_bytes
    if is_float32(element):
        return keys_from, values_from, stored.key_dim, side
    inner = (stored.key_dim + 1) // 2 * 2
    unpacked_or_packed(element, keys_from, stored.key_dim, BLOCK, inner, keys)
    unpacked_or_packed(element, values_from, tokens, stored.width, (tokens + 1) // 2 * 2, values)
    return keys, values, inner, side


def prefill_kernels(element: np.dtype) -> list[Needed]:
    """The kernel by which many queries attend to blocks of `element` and to quantized blocks beside them."""
    return [(attend_prefill, (numba.int64, numba.int64, numba.from_dtype(element)))]


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
