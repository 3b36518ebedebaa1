"""
The Triton kernels of decode attention, which read quantized blocks on the device without dequantizing them first.

The tokens are split among programs, each of which gives the softmax of its scores times its values and the log of the
sum of their exponentials (Flash-Decoding: Dao et al., 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
A last program of each KV head takes the tokens that are in full precision. Query heads that share a KV head are rows
of one product, so that every code is read once. A second kernel merges the results.

A block is taken apart by a shift and a mask of its words, see `kernels.forms.blocks`: the codes then follow each
other in an order of their own (`_order`), in which the other factor of their product is loaded.

Arguments that end in `_TILE` are filled up to powers of two, as Triton asks for.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _order(positions, BITS: tl.constexpr, IS_TOLD: tl.constexpr):
    """
    Return the index, along the axis that a product sums over, of the code at each position after `_codes`.

    `IS_TOLD`: Triton is told that runs of indices follow each other, which it does not see, and loads them together.
    Said of what a function returns, it is lost when the function is inlined.
    """
    HALF: tl.constexpr = 16 // BITS  # codes in half a word
    word, place = positions // (2 * HALF), positions % (2 * HALF)
    pair = word * HALF + place % HALF
    index = pair // 8 * 16 + place // HALF * 8 + pair % 8
    if IS_TOLD:
        index = tl.max_contiguous(tl.multiple_of(index, HALF), HALF)
    return index


@triton.jit
def _codes(words, BITS: tl.constexpr):
    """Return the codes of words `[rows, lanes]` as `[rows * 32 // BITS, lanes]`, in the order of `_order`."""
    shifts = BITS * tl.arange(0, 32 // BITS)
    codes = (words[:, None, :] >> shifts[None, :, None]) & ((1 << BITS) - 1)
    return tl.reshape(codes, [words.shape[0] * (32 // BITS), words.shape[1]])


@triton.jit
def _decoded(
    packed_block,
    indices,
    lanes,
    BITS: tl.constexpr,
    INNER: tl.constexpr,
    INNER_TILE: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """
    Dequantize a packed block, float32 `[INNER_TILE, lanes]`.

    Args:
        packed_block: its address.
        indices: `[INNER_TILE]`, of `_order`.
        lanes: those that are wanted, in any order.
    """
    WORDS: tl.constexpr = INNER * BITS // 32
    rows = tl.arange(0, INNER_TILE * BITS // 32)
    is_lane, is_index = lanes < LANES, indices < INNER
    words = packed_block.to(tl.pointer_type(tl.int32)) + rows[:, None] * LANES + lanes[None, :]
    codes = _codes(tl.load(words, mask=(rows < WORDS)[:, None] & is_lane[None, :], other=0), BITS)
    scales = (packed_block + 4 * WORDS * LANES).to(tl.pointer_type(tl.bfloat16))
    GROUPS: tl.constexpr = (LANES + GROUP - 1) // GROUP
    # As wide as the codes: a column of numbers would be loaded by every thread that has one of its row.
    numbers = tl.broadcast_to(indices[:, None], [INNER_TILE, lanes.shape[0]])
    if GROUPS > 1:
        numbers += (lanes // GROUP)[None, :] * INNER
    is_number = is_index[:, None] & is_lane[None, :]
    scale = tl.load(scales + numbers, mask=is_number, other=0.0).to(tl.float32)
    minimum = tl.load(scales + GROUPS * INNER + numbers, mask=is_number, other=0.0).to(tl.float32)
    return minimum + scale * codes.to(tl.float32)


@triton.jit
def _masked(scores, mask, positions, is_here, MASK: tl.constexpr):
    """
    Mask the scores, which are in powers of two.

    Args:
        mask: the address of each row's first token.
        positions: of the tokens.
        is_here: which scores are of a row and a token that there is.
        MASK: "none", "visible" for what is true where a token is seen, or "bias" for what is added.
    """
    if MASK == "visible":
        is_here = is_here & (tl.load(mask[:, None] + positions[None, :], mask=is_here, other=0) != 0)
    if MASK == "bias":
        bias = tl.load(mask[:, None] + positions[None, :], mask=is_here, other=0.0)
        scores += bias.to(tl.float32) * _LOG2_E
    return tl.where(is_here, scores, float("-inf"))


@triton.jit
def _with_more(top, total, out, scores, values):
    """Update the online softmax: highest score, sum of powers, and weighted values."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights, shrunk = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    added = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, total * shrunk + tl.sum(weights, axis=1), out * shrunk[:, None] + added


# These change between steps or calls; a kernel for each value would be compiled while tokens wait.
_CHANGING = ["num_blocks", "first", "num_full", "blocks_each", "num_rows", "heads", "length"]
_CHANGING += ["mask_batch", "mask_head", "mask_query"]


@triton.jit(do_not_specialize=_CHANGING)
def attend_kernel(
    query,
    turned,
    keys,
    values,
    packed_keys,
    packed_values,
    mask,
    outs,
    lse,
    scale,
    num_blocks,
    first,
    num_full,
    blocks_each,
    num_rows,
    heads,
    length,
    query_batch,
    query_head,
    query_row,
    keys_batch,
    keys_head,
    keys_token,
    values_batch,
    values_head,
    values_token,
    packed_keys_batch,
    packed_keys_head,
    packed_keys_block,
    packed_values_batch,
    packed_values_head,
    packed_values_block,
    mask_batch,
    mask_head,
    mask_query,
    KEY_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_INNER: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    MASK: tl.constexpr,
    OF_CODES: tl.constexpr,
    OF_STATES: tl.constexpr,
):
    """See `splits.attend_in_splits`; the program `(batch * heads, part, tile of rows)`."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    num_splits = tl.num_programs(1)
    # The tokens in full precision, which take the longest, begin first.
    part = num_splits - 1 - tl.program_id(1)
    rows = tl.program_id(2) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    is_row = rows < num_rows
    query_heads = head * (num_rows // length) + rows // length
    mask += batch * mask_batch + query_heads * mask_head + rows % length * mask_query
    all_rows = (batch * heads + head) * num_rows + rows
    columns = tl.arange(0, VALUE_TILE)
    is_column = columns < VALUE_DIM
    scale *= _LOG2_E
    top = tl.full([ROWS_TILE], float("-inf"), tl.float32)
    total, out = tl.zeros([ROWS_TILE], tl.float32), tl.zeros([ROWS_TILE, VALUE_TILE], tl.float32)
    if part < num_splits - 1:
        start = part * blocks_each
        first_block = start.to(tl.int64)
        packed_keys += batch * packed_keys_batch + head * packed_keys_head + first_block * packed_keys_block
        packed_values += batch * packed_values_batch + head * packed_values_head + first_block * packed_values_block
        # Tokens in the order that the codes of values have, channels in that of the codes of keys.
        order, key_order = tl.arange(0, BLOCK), tl.arange(0, KEY_TILE)
        in_block, channels = _order(order, VALUE_BITS, False), _order(key_order, KEY_BITS, False)
        lanes = _order(order, VALUE_BITS, True)
        asked = turned + (all_rows * KEY_DIM)[:, None] + channels[None, :]
        asked = tl.load(asked, mask=is_row[:, None] & (channels < KEY_DIM)[None, :], other=0.0).to(OF_CODES)
        is_here = is_row[:, None] & (in_block < BLOCK)[None, :]
        for block in range(start, min(start + blocks_each, num_blocks)):
            decoded = _decoded(packed_keys, channels, lanes, KEY_BITS, KEY_INNER, KEY_TILE, BLOCK, KEY_GROUP)
            scores = tl.dot(asked, decoded.to(OF_CODES), input_precision="ieee") * scale
            scores = _masked(scores, mask, first + block * BLOCK + in_block, is_here, MASK)
            decoded_values = _decoded(
                packed_values, in_block, columns, VALUE_BITS, BLOCK, BLOCK, VALUE_LANES, VALUE_GROUP
            )
            top, total, out = _with_more(top, total, out, scores, decoded_values.to(OF_CODES))
            packed_keys += packed_keys_block
            packed_values += packed_values_block
    else:
        of_key = tl.arange(0, KEY_TILE)
        is_channel = of_key < KEY_DIM
        query += batch * query_batch + head * query_head
        own = query + (rows * query_row)[:, None] + of_key[None, :]
        own = tl.load(own, mask=is_row[:, None] & is_channel[None, :], other=0.0).to(OF_STATES)
        keys += batch * keys_batch + head * keys_head
        values += batch * values_batch + head * values_head
        for at in tl.range(0, num_full, BLOCK, num_stages=1):  # short, and memory for more stages is scarce
            tokens = at + tl.arange(0, BLOCK)
            is_token = tokens < num_full
            some_keys = keys + tokens[None, :].to(tl.int64) * keys_token + of_key[:, None]
            some_keys = tl.load(some_keys, mask=is_channel[:, None] & is_token[None, :], other=0.0)
            products = tl.dot(own, some_keys.to(OF_STATES), input_precision="ieee") * scale
            # Between the first of them and the others are the quantized ones.
            positions = tl.where(tokens < first, tokens, tokens + num_blocks * BLOCK)
            products = _masked(products, mask, positions, is_row[:, None] & is_token[None, :], MASK)
            some_values = values + tokens[:, None].to(tl.int64) * values_token + columns[None, :]
            some_values = tl.load(some_values, mask=is_token[:, None] & is_column[None, :], other=0.0)
            top, total, out = _with_more(top, total, out, products, some_values.to(OF_STATES))
    is_seen = total != 0  # also of what is not a number, which is not to be hidden
    divisor = tl.where(is_seen, total, 1.0)
    results = all_rows * num_splits + part
    tl.store(lse + results, tl.where(is_seen, (top + tl.log2(divisor)) * _LN_2, float("-inf")), mask=is_row)
    out_at = outs + results[:, None] * VALUE_DIM + columns[None, :]
    tl.store(out_at, out / divisor[:, None], mask=is_row[:, None] & is_column[None, :])


# Parts that a program looks at together, and columns of the map.
_PARTS = tl.constexpr(64)
_COLUMNS = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_rows", "heads", "num_splits", "map_step"])
def merge_kernel(
    outs,
    lse,
    result_map,
    merged,
    num_rows,
    heads,
    num_splits,
    map_step,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    IS_MAPPED: tl.constexpr,
):
    """See `splits.merged`; the program of one row of one KV head of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    outs += row * num_splits * VALUE_DIM
    lse += row * num_splits
    merged += row * VALUE_DIM
    columns = tl.arange(0, VALUE_TILE)
    is_column = columns < VALUE_DIM
    top = tl.load(lse + num_splits - 1)  # the last split has the tokens in full precision
    own = tl.full([], 1.0, tl.float32)
    total = tl.full([], 1.0, tl.float32)
    quantized = tl.zeros([VALUE_TILE], tl.float32)
    for start in range(0, num_splits - 1, _PARTS):
        splits = start + tl.arange(0, _PARTS)
        is_part = splits < num_splits - 1
        some = tl.load(lse + splits, mask=is_part, other=float("-inf"))
        higher = tl.maximum(top, tl.max(some, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights, shrunk = tl.exp(some - base), tl.where(top == higher, 1.0, tl.exp(top - base))
        at = outs + splits[:, None] * VALUE_DIM + columns[None, :]
        values = tl.load(at, mask=is_part[:, None] & is_column[None, :], other=0.0)
        quantized = quantized * shrunk + tl.sum(weights[:, None] * values, axis=0)
        own, total, top = own * shrunk, total * shrunk + tl.sum(weights, axis=0), higher
    full = outs + (num_splits - 1) * VALUE_DIM
    if IS_MAPPED:
        result_map += row // num_rows % heads * map_step
        for first in range(0, VALUE_DIM, _COLUMNS):
            some_columns = first + tl.arange(0, _COLUMNS)
            is_some = some_columns < VALUE_DIM
            mapping = tl.load(
                result_map + columns[:, None] * VALUE_DIM + some_columns[None, :],
                mask=is_column[:, None] & is_some[None, :],
                other=0.0,
            )
            result = tl.sum(quantized[:, None] * mapping, axis=0)
            result += own * tl.load(full + some_columns, mask=is_some, other=0.0)
            tl.store(merged + some_columns, (result / total).to(merged.dtype.element_ty), mask=is_some)
    else:
        result = quantized + own * tl.load(full + columns, mask=is_column, other=0.0)
        tl.store(merged + columns, (result / total).to(merged.dtype.element_ty), mask=is_column)


@triton.jit
def add_one(numbers):
    """The smallest kernel, which shows whether Triton runs any."""
    tl.store(numbers, tl.load(numbers) + 1)
