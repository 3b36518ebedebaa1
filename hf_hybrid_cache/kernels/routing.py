"""Which tokens are multiplied with which of several matrices."""

from typing import Any, NamedTuple

import numba
import numpy as np

from .compiled import jit_part
from .numbers_at import clear_numbers
from .tiles import pointer

# What a thread takes at a time: little enough that all end at about the same time, and not less, because the first
# lines of a part come late.
PART_BYTES = 2**19
_PARTS_OF_THREAD = 4


class Routing(NamedTuple):
    """Pairs of a token and a matrix, those of one matrix side by side: a group."""

    pairs: Any  # int64 [places], which pair is in each place
    starts: Any  # int64 [groups + 1], the first place of each group, and the end
    matrices: Any  # int64 [groups]
    wrong: int  # how many pairs there are of no matrix, and not of the first beyond


@jit_part
def routed(chosen, num_pairs, num_matrices, only):
    """
    Sort pairs by their matrices, so that each matrix is read once.

    Pairs of matrix `num_matrices`, the first beyond, are left out: transformers means none by it.

    chosen: address of int64 [num_pairs], the matrix of each pair; 0 if all are of matrix `only`.
    """
    pairs = np.empty(num_pairs, np.int64)
    if not chosen:
        for pair in range(num_pairs):
            pairs[pair] = pair
        return Routing(pairs, np.array([0, num_pairs]), np.array([only]), 0)
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
        counts[matrix] = place  # from here on, where its next pair goes
        if count:
            place += count
            matrices[group] = matrix
            group += 1
            starts[group] = place
    for pair in range(num_pairs):
        if 0 <= matrix_of[pair] < num_matrices:
            pairs[counts[matrix_of[pair]]] = pair
            counts[matrix_of[pair]] += 1
    return Routing(pairs, starts, matrices, wrong)


@jit_part
def parts_of(num_bytes, matrices, threads):
    """In how many parts each of some matrices is read: at least as many as threads, and if it can be, four times."""
    needed = threads * min(matrices, _PARTS_OF_THREAD)
    return max(num_bytes // PART_BYTES, (needed + matrices - 1) // max(matrices, 1), 1)


def multiplying_chosen(write_products):
    """
    What writes products with those of several weights of one kind that tokens have chosen.

    Made for each kind, because Numba keeps no compiled function that is told another one.

    write_products: writes products with such weights.
    """

    @jit_part
    def multiply_chosen(
        parallel, team, threads, weights, chosen, only, num_pairs, tokens, pairs_of_token, bias, bias_step, out
    ):
        """Zeros for pairs of no weight; returns how many indices are wrong."""
        routing = routed(chosen, num_pairs, weights.matrices, only)
        places = routing.starts[-1]
        if places < num_pairs:
            clear_numbers(out, num_pairs * weights.rows)
        sources = routing.pairs[:places] // pairs_of_token
        write_products(parallel, team, threads, weights, routing, sources, tokens, routing.pairs, bias, bias_step, out)
        return routing.wrong

    return multiply_chosen
