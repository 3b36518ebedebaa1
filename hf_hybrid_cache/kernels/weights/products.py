"""
Products of tokens with matrices in host memory: `tokens @ matrix.T`, quantized or in full precision.

One call multiplies with one matrix, or with several of one shape, such as a layer's experts, and reads only those that
a token has chosen. Threads take parts of a matrix: panels, or rows. All tokens of the matrix are multiplied with them
while they are in the cache.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from ..forms.panels import PanelLayout
from ..vector.compiled import Needed, jit, jit_function, jit_inlined, taking_numbers
from ..vector.intrinsics import address_of_call, call_at
from ..vector.numbers_at import (
    Numbers,
    address_of,
    array_at,
    clear_numbers,
    floats_at,
    integers_at,
    keep,
    load_numbers,
    store_numbers,
    store_sixteen,
)
from ..vector.parallel import split_work, team_of_kernels, threads_of
from ..vector.vector_ir import CACHE_LINE, LANES
from .operands import round_group, whole_group, write_gated
from .panel_tiles import SQUARE, SQUARE_BITS, TOKENS, multiply_panels
from .plain_tiles import ROW_TOKENS, STEP, multiply_row

# What the units of a matrix are, which threads take parts of.
PANELS, ROWS = range(2)
# Bytes of a matrix that a thread takes at a time: few enough for all threads to end at about the same time, and not
# fewer, because the first cache lines of a part come late.
_PART_BYTES = 2**19
_PARTS_OF_THREAD = 4
# Numbers of tokens that a thread takes at a time. To wake another thread for fewer would take longer.
_PART_NUMBERS = 2**15
_SQUARE_PANELS, _SQUARE_TOKENS = SQUARE


class Weights(NamedTuple):
    """Matrices of one shape, one after the other, as kernels read them."""

    kind: int  # `PANELS` or `ROWS`
    address: int  # of the first matrix
    count: int  # number of matrices
    matrix_bytes: int
    rows: int
    columns: int
    is_bfloat16: int  # whether the numbers of plain matrices are bfloat16, not float32
    operand_columns: int  # numbers of a token's operand: the columns, in whole groups if the matrices are panels
    # The others are of panels.
    bits: int = 0
    group: int = 1
    groups: int = 0
    panel_bytes: int = 0
    factors: int = 0  # address of float64 [count]


class Routing(NamedTuple):
    """Pairs of a token and a matrix, sorted by matrix; the pairs of one matrix are a run."""

    pairs: Any  # int64 [places], the index of the pair in each place
    matrices: Any  # int64 [runs], the matrix of each run
    starts: Any  # int64 [runs + 1], the first place of each run, and the end
    wrong: int  # number of pairs with an invalid id; the padding id does not count


class Product(NamedTuple):
    """One product with matrices, for its threads; integers, so that it can be read from memory, see `call_at`."""

    weights: int  # address of `Weights`
    places: int
    pairs: int  # address; this and the next two are of `Routing`
    matrices: int
    starts: int
    tokens: int  # address of [tokens, columns], or of [tokens, 2 * columns], of which the first half is the gate
    tokens_are_bfloat16: int
    token_step: int  # numbers from a token to the next
    pairs_of_token: int
    is_gated: int
    operand: int  # address of the tokens in their places: integers [places, groups * group], or float32
    steps: int  # address of float32 [places, groups], which integers are multiples of
    sums: int  # address of float32 [places, groups], sums of the rounded numbers
    operand_parts: int
    bias: int  # address of [matrices, rows]; 0 for none
    bias_is_bfloat16: int
    bias_step: int  # numbers from the bias of one matrix to that of the next
    out: int  # address of [pairs, rows]
    out_is_bfloat16: int
    out_step: int  # numbers from a pair's to the next one's
    parts: int  # of each matrix


class Products:
    """
    Products with matrices of one shape. The caller keeps the matrices alive.

    Args:
        weights: the matrices.
        kept: what else stays alive.
    """

    def __init__(self, weights: Weights, kept: object = None):
        # Kernels take an address: a tuple of so many numbers would take longer in each call, and to compile.
        self._weights = array("q", weights)
        self.address: int = self._weights.buffer_info()[0]
        self._kept = kept

    @property
    def weights(self) -> Weights:
        """The weights as kernels read them."""
        return Weights(*self._weights)

    @classmethod
    def of_panels(cls, address: int, layout: PanelLayout, factors: Sequence[float]) -> "Products":
        """
        Products with quantized weights.

        Args:
            address: of the first weight, `layout.num_bytes` before the next.
            layout: of each weight.
            factors: of each weight, see `factor_of`.
        """
        kept = np.array(factors, np.float64)
        weights = Weights(
            kind=PANELS,
            address=address,
            count=len(factors),
            matrix_bytes=layout.num_bytes,
            rows=layout.rows,
            columns=layout.columns,
            is_bfloat16=False,
            operand_columns=layout.groups * layout.group,
            bits=layout.bits,
            group=layout.group,
            groups=layout.groups,
            panel_bytes=layout.panel_bytes,
            factors=kept.ctypes.data,
        )
        return cls(weights, kept)

    @classmethod
    def of_numbers(cls, address: int, count: int, rows: int, columns: int, is_bfloat16: bool) -> "Products":
        """
        Products with weights in full precision.

        Args:
            address: of `[count, rows, columns]`.
            count: number of weights.
            rows: outputs of a weight.
            columns: inputs of a weight.
            is_bfloat16: whether weights are bfloat16, not float32.
        """
        matrix_bytes = rows * columns * (2 if is_bfloat16 else 4)
        return cls(Weights(ROWS, address, count, matrix_bytes, rows, columns, is_bfloat16, operand_columns=columns))

    def multiply(
        self,
        index: int,
        tokens: int,
        num_pairs: int,
        is_bfloat16: bool,
        bias: int,
        out: int,
        chosen: int = 0,
        pairs_of_token: int = 1,
    ) -> int:
        """
        Write `token @ weight.T + bias` for pairs of a token and a weight; the pairs of a token follow each other.

        Args:
            index: of the weight, if all tokens are multiplied with one.
            tokens: address of contiguous `[num_pairs / pairs_of_token, columns]`, float32 or bfloat16.
            num_pairs: at least 1.
            is_bfloat16: whether tokens, bias and `out` are bfloat16, not float32.
            bias: address of `[rows]`, or of `[weights, rows]` if tokens choose; 0 for none.
            out: address of contiguous `[num_pairs, rows]`, written.
            chosen: address of int64 `[num_pairs]`, the id of each pair's weight, if tokens choose. The number of
                weights is the padding id, for which zeros are written.
            pairs_of_token: number of weights that a token has chosen.

        Returns:
            The number of pairs with an invalid id; zeros are written for them, too.
        """
        team = team_of_kernels().address
        wrong = _multiply(team, self.address, index, tokens, num_pairs, is_bfloat16, bias, out, chosen, pairs_of_token)
        return int(wrong)


@jit
def _multiply(team, weights, index, tokens, num_pairs, is_bfloat16, bias, out, chosen, pairs_of_token):
    given = call_at(weights, Weights)
    routing = routed(chosen, num_pairs, given.count, index)
    write_products(
        team, weights, routing, Numbers(tokens, is_bfloat16), pairs_of_token, False,
        Numbers(bias, is_bfloat16), given.rows if chosen else 0, Numbers(out, is_bfloat16), num_pairs,
    )  # fmt: skip
    return routing.wrong


def product_kernels() -> list[Needed]:
    """The kernel of products with few tokens."""
    return [(_multiply, taking_numbers(_multiply))]


@jit_function
def routed(chosen, num_pairs, num_matrices, only):
    """
    Sort pairs by their matrices, so that each matrix is read once.

    Pairs with the id `num_matrices` are left out: it is the padding id of transformers, for no matrix.

    chosen: address of int64 [num_pairs], the id of the matrix of each pair; 0 if all pairs are of matrix `only`.
    """
    pairs = np.empty(num_pairs, np.int64)
    if not chosen:
        for pair in range(num_pairs):
            pairs[pair] = pair
        return Routing(pairs, np.array([only]), np.array([0, num_pairs]), 0)
    matrix_of = integers_at(chosen, num_pairs)
    counts = np.zeros(num_matrices + 1, np.int64)
    wrong = 0
    for pair in range(num_pairs):
        if 0 <= matrix_of[pair] <= num_matrices:
            counts[matrix_of[pair]] += 1
        else:
            wrong += 1
    runs, place = 0, 0
    starts, matrices = np.zeros(num_matrices + 1, np.int64), np.empty(num_matrices, np.int64)
    for matrix in range(num_matrices):
        count = counts[matrix]
        counts[matrix] = place  # from here on, the place of the matrix's next pair
        if count:
            place += count
            matrices[runs] = matrix
            runs += 1
            starts[runs] = place
    for pair in range(num_pairs):
        if 0 <= matrix_of[pair] < num_matrices:
            pairs[counts[matrix_of[pair]]] = pair
            counts[matrix_of[pair]] += 1
    return Routing(pairs[:place], matrices[:runs], starts[: runs + 1], wrong)


# Put into its callers before they are compiled: LLVM would optimize the code of parts once more.
@numba.njit(inline="always")
def write_products(team, weights, routing, tokens, pairs_of_token, is_gated, bias, bias_step, out, num_pairs):
    """Write the products of a routing, and zeros for pairs without a matrix. See `Product`."""
    given = call_at(weights, Weights)
    places, runs, is_quantized = routing.pairs.size, routing.matrices.size, given.kind == PANELS
    if places < num_pairs:
        clear_numbers(out, num_pairs * given.rows)
    operand = np.empty(places * given.operand_columns * (2 if is_quantized else 4), np.uint8)
    numbers = np.empty((2, places * given.groups), np.float32)
    token_step = given.columns * 2 if is_gated else given.columns
    product = Product(
        weights=weights,
        places=places,
        pairs=routing.pairs.ctypes.data,
        matrices=routing.matrices.ctypes.data,
        starts=routing.starts.ctypes.data,
        tokens=tokens.address,
        tokens_are_bfloat16=tokens.is_bfloat16,
        token_step=token_step,
        pairs_of_token=pairs_of_token,
        is_gated=is_gated,
        operand=operand.ctypes.data,
        steps=numbers[0].ctypes.data,
        sums=numbers[1].ctypes.data,
        operand_parts=parts_of_rows(places, given.operand_columns),
        bias=bias.address,
        bias_is_bfloat16=bias.is_bfloat16,
        bias_step=bias_step,
        out=out.address,
        out_is_bfloat16=out.is_bfloat16,
        out_step=given.rows,
        parts=_parts(given, runs, threads_of(team)),
    )
    address = address_of_call(product)
    split_work(team, product.operand_parts, take_tokens, address)
    split_work(team, product.parts * runs, multiply_part, address)
    for array_of_routing in (routing.pairs, routing.matrices, routing.starts):
        keep(array_of_routing)
    keep(operand)
    keep(numbers)


@jit_function
def parts_of_rows(rows, columns):
    """Number of parts in which threads take rows of numbers."""
    return max(1, min(rows, rows * columns // _PART_NUMBERS))


@jit_function
def _parts(weights, runs, threads):
    """Number of parts of each matrix, so that the matrices of all runs together have several parts for each thread."""
    needed = (threads * min(runs, _PARTS_OF_THREAD) + runs - 1) // max(runs, 1)
    parts = max(weights.matrix_bytes // _PART_BYTES, needed, 1)
    if weights.kind == PANELS:
        return min(parts, (weights.rows + LANES - 1) // LANES)
    return min(parts, weights.rows)


@jit_inlined
def part_of(part, parts, count):
    """The first index of a part of `count`, and the end."""
    return part * count // parts, (part + 1) * count // parts


@jit
def take_tokens(part, address):
    """Write the operand of a part of the places of a `Product`."""
    product = call_at(address, Product)
    weights = call_at(product.weights, Weights)
    pairs, columns, group = integers_at(product.pairs, product.places), weights.columns, weights.group
    gated, filled = np.empty(columns + LANES, np.float32), np.empty(group, np.float32)
    first, last = part_of(part, product.operand_parts, product.places)
    for place in range(first, last):
        token = pairs[place] // product.pairs_of_token
        if product.is_gated:
            states = product.tokens + token * product.token_step * 4
            write_gated(states, states + columns * 4, False, columns, gated.ctypes.data)
            numbers = Numbers(np.int64(gated.ctypes.data), False)
        else:
            given = Numbers(product.tokens, product.tokens_are_bfloat16 != 0)
            numbers = Numbers(address_of(given, token * product.token_step), given.is_bfloat16)
        if weights.kind != PANELS:
            load_numbers(numbers, 0, columns, floats_at(product.operand, (product.places, columns))[place])
        else:
            for index in range(weights.groups):
                whole = whole_group(numbers, index * group, columns - index * group, filled)
                number = place * weights.groups + index
                round_group(
                    weights.bits,
                    whole.address,
                    whole.is_bfloat16,
                    group,
                    product.operand + number * group * 2,
                    product.steps + number * 4,
                    product.sums + number * 4,
                )


@jit_inlined
def tokens_at_once(most, left):
    """The largest power of two of at most `most` tokens that are left."""
    while most > left:
        most //= 2
    return most


@jit_function
def multiply_part(part, address):
    """Write the outputs of a part of a matrix of a `Product`, for all tokens of its run."""
    product = call_at(address, Product)
    if call_at(product.weights, Weights).kind == PANELS:
        _multiply_panels(part, product)
    else:
        _multiply_plain(part, product)


@jit_function
def _multiply_panels(part, product):
    """Write the outputs of a part of the panels of a matrix."""
    weights = call_at(product.weights, Weights)
    given, out = _bias_and_out(product)
    run, part = part // product.parts, part % product.parts
    matrix = integers_at(product.matrices, run + 1)[run]
    start, end = integers_at(product.starts + run * 8, 2)
    pairs = integers_at(product.pairs, product.places)
    address = weights.address + matrix * weights.matrix_bytes
    factor = factor_at(weights, matrix)
    biases = np.zeros((_SQUARE_PANELS, LANES), np.float32)
    outputs = np.empty((TOKENS[0], LANES), np.float32)
    stride, number_stride = weights.groups * weights.group * 2, weights.groups * 4
    # With fewer tokens a panel is read once, and two panels at once would come from memory later.
    is_square = weights.bits == SQUARE_BITS and end - start > TOKENS[0]
    first, last = part_of(part, product.parts, (weights.rows + LANES - 1) // LANES)
    for panel in range(first, last, _SQUARE_PANELS):
        panels = min(_SQUARE_PANELS, last - panel)
        for which in range(panels):
            load_bias(given, matrix * product.bias_step, (panel + which) * LANES, weights.rows, biases[which])
        place = start
        while place < end:
            is_here = is_square and panels == _SQUARE_PANELS and end - place >= _SQUARE_TOKENS
            tokens = _SQUARE_TOKENS if is_here else tokens_at_once(TOKENS[0], end - place)
            at_once = _SQUARE_PANELS if is_here else 1
            for left in range(0, panels, at_once):
                multiply_panels(
                    weights.bits,
                    at_once,
                    tokens,
                    address + (panel + left) * weights.panel_bytes,
                    weights.panel_bytes,
                    weights.groups,
                    weights.group * weights.bits // 32,
                    product.operand + place * stride,
                    stride,
                    product.steps + place * number_stride,
                    product.sums + place * number_stride,
                    number_stride,
                    outputs.ctypes.data,
                )
                for token in range(tokens):
                    for which in range(at_once):
                        output = outputs.ctypes.data + (token * at_once + which) * CACHE_LINE
                        bias, row = biases.ctypes.data + (left + which) * CACHE_LINE, (panel + left + which) * LANES
                        target = pairs[place + token] * product.out_step + row
                        store_outputs(output, factor, bias, out, target, weights.rows - row)
            place += tokens
    keep(outputs)
    keep(biases)


@jit_inlined
def _bias_and_out(product):
    bias = Numbers(product.bias, product.bias_is_bfloat16 != 0)
    return bias, Numbers(product.out, product.out_is_bfloat16 != 0)


@jit_inlined
def factor_at(weights, matrix):
    """The factor of a quantized matrix."""
    return np.float32(array_at(weights.factors, matrix + 1, np.float64(0))[matrix])


@jit_inlined
def load_bias(bias, first, row, rows, out):
    """Write the bias of sixteen rows of a matrix to float32 `out`; `first` is the index of the matrix's bias."""
    if bias.address and row < rows:
        load_numbers(bias, first + row, min(LANES, rows - row), out)


@jit_inlined
def store_outputs(outputs, factor, bias, out, first, left):
    """Write sixteen outputs times a factor from index `first` on, or those that are left; outputs, bias: addresses."""
    if left >= LANES:
        store_sixteen(outputs, factor, bias, out.is_bfloat16, address_of(out, first))
    else:
        store_sixteen(outputs, factor, bias, False, outputs)
        store_numbers(floats_at(outputs, LANES), out, first, left)


@jit_function
def _multiply_plain(part, product):
    """Write the outputs of a part of the rows of a matrix in full precision."""
    weights = call_at(product.weights, Weights)
    bias, out = _bias_and_out(product)
    run, part = part // product.parts, part % product.parts
    matrix = integers_at(product.matrices, run + 1)[run]
    start, end = integers_at(product.starts + run * 8, 2)
    rows, columns, count = weights.rows, weights.columns, end - start
    first, last = part_of(part, product.parts, rows)
    width, stride = last - first, columns * 4
    operand = floats_at(product.operand + start * stride, (count, columns))
    sums = np.zeros((count, width), np.float32)
    if bias.address:
        for index in range(count):
            load_numbers(bias, matrix * product.bias_step + first, width, sums[index])
    numbers = Numbers(weights.address + matrix * weights.matrix_bytes, weights.is_bfloat16 != 0)
    steps = columns // STEP
    whole = steps * STEP
    tail, outputs = np.empty(columns - whole, np.float32), np.zeros(ROW_TOKENS[0], np.float32)
    for row in range(width):
        at = (first + row) * columns
        load_numbers(numbers, at + whole, tail.size, tail)
        done = 0
        while done < count:
            tokens = tokens_at_once(ROW_TOKENS[0], count - done)
            if steps:
                inputs = operand[done].ctypes.data
                address = address_of(numbers, at)
                multiply_row(numbers.is_bfloat16, tokens, address, steps, inputs, stride, outputs.ctypes.data)
            for index in range(tokens):
                total = outputs[index] + sums[done + index, row]
                for column in range(tail.size):
                    total += tail[column] * operand[done + index, whole + column]
                sums[done + index, row] = total
            done += tokens
    pairs = integers_at(product.pairs, product.places)
    for index in range(count):
        store_numbers(sums[index], out, pairs[start + index] * product.out_step + first, width)
