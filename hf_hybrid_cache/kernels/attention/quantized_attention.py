"""
Attention of a few queries over quantized blocks in host memory, with blocks in full precision before and after them.

The steps are those of `attention`. Products use the codes themselves, see `quantized_tiles`.
"""

import numpy as np
from numba import boolean, float32, int64, uint8

from ..blocks import BLOCK
from ..quantized.folding import SLOTS
from ..vector.calls import kernel_call, taking
from ..vector.compiled import Needed, jit, jit_function, jit_inlined
from ..vector.parallel import split_work
from ..vector.prefetching import prefetch_bytes
from ..vector.rotation import rotate
from .attention import Call, attend_block, merge_segments, share, started_segment, take_queries
from .quantized_slots import attend_slots, forms_of, put_into_slot

# One call of `attend_quantized`: the fields of a `Call` on the blocks in full precision, and more.
QuantizedCall = kernel_call(
    "QuantizedCall",
    __name__,
    Call.field_types
    | {
        "packed_keys": uint8[:, :, ::1],  # [quantized blocks or more, heads, bytes]
        "packed_values": uint8[:, :, ::1],  # [quantized blocks or more, heads, bytes]
        "first_quantized": int64,  # number of blocks in full precision before the quantized ones
        "quantized_blocks": int64,
        "key_bits": int64,
        "value_bits": int64,
        "key_group": int64,  # lanes that share a scale
        "value_group": int64,
        "is_integer": boolean,  # whether to use the processor's integer dot products
        "key_dim": int64,
        "key_rotation": int64,  # channels of a key that were rotated together before quantization
        "value_rotation": int64,
        "query_factors": float32[:, ::1],  # [num_kv_heads, key_dim] of the query for quantized keys, or empty
        "rotation_matrix": float32[:, :, ::1],  # [num_kv_heads, value_dim, value_dim] of quantized values, or empty
        "quantized_segments": int64,  # segments of quantized blocks; those of blocks in full precision follow
        "rotated": float32[:, :, ::1],  # scratch, shaped as the query
        "operands": float32[:, :, :, :, ::1],  # scratch [segments, 2, SLOTS, ROWS, longest inner axis]
        "row_numbers": float32[:, :, :, ::1],  # scratch [segments, ROW_NUMBERS, SLOTS, ROWS]
        "lane_numbers": float32[:, :, :, :, ::1],  # scratch [segments, LANE_NUMBERS, SLOTS, ROWS, LANES]
        "slots": int64[:, :, ::1],  # scratch [segments, SLOTS, SLOT_NUMBERS]
    },
)


@jit
def attend_quantized(team, call):
    """Attend as `call` says, on several threads as `split_work` says."""
    segments, heads = call.maxima.shape[:2]
    take_queries(call)
    rotate_queries(call)
    split_work(team, segments, attend_segment, call)
    split_work(team, heads, merge_quantized_segments, call)


@jit_function
def rotate_queries(call):
    """Write the queries for quantized keys: times `query_factors`, then rotated as the keys were."""
    query, rotated, factors = call.query, call.rotated, call.query_factors
    heads, _, inner = query.shape
    for head in range(heads):
        for row in range(call.group * call.query_length):
            for d in range(inner):  # an assignment of arrays takes seconds to compile
                rotated[head, row, d] = query[head, row, d]
            if factors.size:
                for d in range(call.key_dim):
                    rotated[head, row, d] *= factors[head % call.num_kv_heads, d]
            rotate(rotated[head, row].ctypes.data, call.key_dim, call.key_rotation)


@jit_function
def attend_segment(segment, call):
    """Attend to a segment's blocks, all quantized or all in full precision; all heads of a block before the next."""
    if segment >= call.quantized_segments:
        attend_full_segment(segment, call)
        return
    heads = call.maxima.shape[1]
    items, plan = started_quantized_segment(segment, call)
    forms, tokens = forms_of(segment, call), (0, BLOCK)
    prefetch_rotation_matrix(segment, call)
    block = items.start // heads
    head, start = items.start - block * heads, (call.first_quantized + block) * BLOCK
    for item in range(items.start, items.stop, SLOTS):
        count = min(SLOTS, items.stop - item)
        for slot in range(count):
            following = min(item + SLOTS + slot, items.stop - 1)
            put_into_slot(slot, item + slot, head, start, tokens, following, tokens, *forms)
            head += 1
            if head == heads:
                head, start = 0, start + BLOCK
        attend_slots(count, plan, *forms)


@jit_inlined
def started_quantized_segment(segment, call):
    """The numbers of the blocks in a segment of quantized blocks, and the plan of the segment."""
    items = share(segment, call.quantized_segments, call.quantized_blocks * call.maxima.shape[1])
    return items, started_segment(segment, items, call)


@jit_inlined
def prefetch_rotation_matrix(segment, call):
    """Prefetch a segment's part of the rotation matrix, which the merge of all segments reads."""
    if call.rotation_matrix.size:
        part = call.rotation_matrix.nbytes // call.quantized_segments
        prefetch_bytes(call.rotation_matrix.ctypes.data + segment * part, part)


@jit_function
def attend_full_segment(segment, call):
    """Attend to a segment's blocks, all in full precision."""
    heads = call.maxima.shape[1]
    key_block, value_block = call.keys[0, 0].nbytes, call.values[0, 0].nbytes
    keys, values = call.keys.ctypes.data, call.values.ctypes.data
    blocks = (call.num_tokens + BLOCK - 1) // BLOCK - call.quantized_blocks
    items = share(segment - call.quantized_segments, call.maxima.shape[0] - call.quantized_segments, blocks * heads)
    plan = started_segment(segment, items, call)
    for item in items:
        block = item // heads
        head, at = item - block * heads, keys + item * key_block
        start = (block if block < call.first_quantized else block + call.quantized_blocks) * BLOCK
        attend_block(head, start, at, values + item * value_block, at + key_block, plan)


@jit_function
def merge_quantized_segments(head, call):
    """Write the result of a head from its segments, those of quantized blocks first."""
    kv_head = head % call.num_kv_heads if call.rotation_matrix.size else 0
    rotation_matrix = call.rotation_matrix[kv_head]
    merge_segments(head, call, call.quantized_segments, call.value_rotation, rotation_matrix)


def quantized_attention_kernels(element: np.dtype) -> list[Needed]:
    """The kernel that attends to quantized blocks beside blocks of `element`."""
    return [(attend_quantized, taking(QuantizedCall, element))]
