"""Routing: which tokens are multiplied with which of several matrices."""

from typing import Any, NamedTuple

import numba
import numpy as np

from ..vector.compiled import jit_function
from ..vector.numbers_at import clear_numbers
from ..vector.tiles import pointer

# Bytes that a thread takes at a time: few enough for all threads to end at about the same time, and not fewer, because
# the first cache lines of a part come late.
PART_BYTES = 2**19
_PARTS_OF_THREAD = 4


class Routing(NamedTuple):
    """Pairs of a token and a matrix, sorted by matrix; the pairs of one matrix are a group."""

    pairs: Any  # int64 [places], the index of the pair in each place
    starts: Any  # int64 [groups + 1], the first place of each group, and the end
    matrices: Any  # int64 [groups], the matrix of each group
    wrong: int  # number of pairs with an invalid id; the padding id does not count


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
        return Routing(pairs=pairs, starts=np.array([0, num_pairs]), matrices=np.array([only]), wrong=0)
    matrix_of = numba.carray(pointer(chosen, np.int64(0)), num_pairs)
    counts = np.zeros(num_matrices + 1, np.int64)
    wrong = 0
    for pair in range(num_pairs):
        if 0 <= matrix_of[pair] <= num_matrices:
            counts[matrix_of[pair]] += 1
        else:
            wrong += 1
    groups = 0
    for matrix in range(num_matrices):
        groups += counts[matrix] > 0
    starts, matrices = np.zeros(groups + 1, np.int64), np.empty(groups, np.int64)
    group, place = 0, 0
    for matrix in range(num_matrices):
        count = counts[matrix]
        counts[matrix] = place  # from here on, the place of the matrix's next pair
        if count:
            place += count
            matrices[group] = matrix
            group += 1
            starts[group] = place
    for pair in range(num_pairs):
        if 0 <= matrix_of[pair] < num_matrices:
            pairs[counts[matrix_of[pair]]] = pair
            counts[matrix_of[pair]] += 1
    return Routing(pairs=pairs, starts=starts, matrices=matrices, wrong=wrong)


@jit_function
def parts_of(num_bytes, matrices, threads):
    """Number of parts of each matrix, so that all matrices together have several parts for each thread."""
    needed = threads * min(matrices, _PARTS_OF_THREAD)
    return max(num_bytes // PART_BYTES, (needed + matrices - 1) // max(matrices, 1), 1)


def multiplying_chosen(write_products):
    """
    Make the function that writes products of tokens with the weights, of one kind, that they have chosen.

    Numba keeps no compiled function that takes another as an argument, so each kind has its own.

    write_products: a jitted function that writes products with such weights.
    """

    @jit_function
    def multiply_chosen(team, weights, chosen, only, num_pairs, tokens, pairs_of_token, bias, bias_step, out):
        """Write the products, and zeros for pairs without a weight; returns the number of pairs with an invalid id."""
        routing = routed(chosen, num_pairs, weights.matrices, only)
        places = routing.starts[-1]
        if places < num_pairs:
            clear_numbers(out, num_pairs * weights.rows)
        sources = routing.pairs[:places] // pairs_of_token
        write_products(team, weights, routing, sources, tokens, routing.pairs, bias, bias_step, out)
        return routing.wrong

    return multiply_chosen
