"""All entries of one kind that a layer has stored, in one or more segments."""

from typing import NamedTuple

from .kv_store import Pair
from .runs.host_blocks import HostBlocks
from .runs.run import Run


class Piece(NamedTuple):
    """
    Entries of a segment, one after the other.

    Attributes:
        segment: that holds them.
        start: the first one.
        end: the one after the last.
        repeats: how often each sequence counts, side by side.
    """

    segment: Run
    start: int
    end: int
    repeats: int = 1


class Part(NamedTuple):
    """
    All tokens in full precision, or all packed blocks, in order.

    Attributes:
        form: a segment of such entries.
        runs: in order.
    """

    form: Run
    runs: tuple[Piece, ...]

    @classmethod
    def whole(cls, segment: Run) -> "Part":
        """Return all entries of a segment."""
        return cls(segment, (Piece(segment, 0, segment.num_entries),))

    @property
    def num_entries(self) -> int:
        """Number of entries."""
        return sum(run.end - run.start for run in self.runs)

    @property
    def own_segment(self) -> HostBlocks | None:
        """The segment in host memory that holds these entries and no others, if there is one."""
        return self.form if self._is_one_run and isinstance(self.form, HostBlocks) else None

    def repeated(self, repeats: int) -> "Part":
        """Return the same entries with each sequence so often, side by side."""
        return Part(self.form, tuple(run._replace(repeats=repeats) for run in self.runs))

    def in_one_segment(self) -> Run:
        """Return a segment with these entries and no others: the one that holds them, or a copy in host memory."""
        return self.form if self._is_one_run else self.in_host_memory()

    def in_host_memory(self) -> HostBlocks:
        """Return a segment in host memory with these entries and no others: the own one, or a copy."""
        if self.own_segment is not None:
            return self.own_segment
        made = HostBlocks.like(self.form, self.num_entries)
        for segment, start, end, repeats in self.runs:
            made.extend_from(segment, start, end, repeats)
        return made

    def rows_from(self, start: int) -> Pair:
        """Return the rows from entry `start` on, the first one of a row, as they are stored in host memory."""
        segment, first = self.own_segment, start
        if segment is None:
            segment, first, place = HostBlocks.like(self.form, self.num_entries - start), 0, 0
            for run in self.runs:
                begin = run.start + max(start - place, 0)
                if begin < run.end:
                    segment.extend_from(run.segment, begin, run.end, run.repeats)
                place += run.end - run.start
        segment.wait_for_copies()
        segment.clear_rest()
        keys, values = segment.rows()
        return keys[segment.keys.rows(first) :], values[segment.values.rows(first) :]

    @property
    def _is_one_run(self) -> bool:
        return len(self.runs) == 1 and self.runs[0].repeats == 1
