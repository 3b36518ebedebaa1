"""Entries of runs, one after the other, as one sequence: for files, and for stores of another place or type."""

from collections.abc import Sequence
from typing import NamedTuple

from .kv_shape import Pair
from .runs.host_blocks import HostBlocks
from .runs.run import Run


class Piece(NamedTuple):
    """
    Entries of a run, one after the other.

    Attributes:
        run: that holds them.
        start: the first one.
        end: the one after the last.
        repeats: how often each sequence counts, side by side.
    """

    run: Run
    start: int
    end: int
    repeats: int = 1


def in_one_run(pieces: Sequence[Piece]) -> Run:
    """Return a run with these entries and no others: the one that holds them, or a copy in host memory."""
    return _whole_run(pieces) or _gathered(pieces)


def rows_of(pieces: Sequence[Piece], start: int = 0) -> Pair:
    """Return the rows from entry `start` on, the first one of a row, as they are stored in host memory."""
    run, first = _whole_run(pieces), start
    if not isinstance(run, HostBlocks):
        run, first = _gathered(pieces, start), 0
    run.wait_for_copies()
    run.clear_rest()
    keys, values = run.rows()
    return keys[run.keys.rows(first) :], values[run.values.rows(first) :]


def _whole_run(pieces: Sequence[Piece]) -> Run | None:
    """Return the run that holds these entries and no others, if there is one."""
    return pieces[0].run if len(pieces) == 1 and pieces[0].repeats == 1 else None


def _gathered(pieces: Sequence[Piece], start: int = 0) -> HostBlocks:
    """Copy the entries from `start` on to a run in host memory."""
    run, place = HostBlocks.like(pieces[-1].run, sum(each.end - each.start for each in pieces) - start), 0
    for source, first, end, repeats in pieces:
        begin = first + max(start - place, 0)
        if begin < end:
            run.extend_from(source, begin, end, repeats)
        place += end - first
    return run
