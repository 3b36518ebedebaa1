"""Segments: entries of runs, one after the other, which are the tokens of a layer in order."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from .codec import CodecChoice
from .kv_shape import Pair
from .runs.run import HostBlocks, Run, repeated


class Segment(NamedTuple):
    """
    Entries of a run, one after the other.

    Attributes:
        run: that holds them.
        start: the first one.
        end: the one after the last.
        choice: the codec of packed blocks; not needed to copy them.
        repeats: how often each sequence counts, side by side.
    """

    run: Run
    start: int
    end: int
    choice: CodecChoice | None = None
    repeats: int = 1

    @property
    def is_packed(self) -> bool:
        """Whether entries are packed blocks."""
        return self.run.keys.entry_tokens > 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the entries stand for."""
        return (self.end - self.start) * self.run.keys.entry_tokens

    def read_into(self, states: Pair, at: int) -> int:
        """Write the tokens into `states`, on the compute device, from token `at` on; return the next one."""
        run, start, end, choice, repeats = self
        stop, entries = at + (end - start) * run.keys.entry_tokens, run.read(start, end)
        keys, values = states[0][::repeats, :, at:stop], states[1][::repeats, :, at:stop]
        if choice is not None:
            choice.decode(entries, (keys, values))
        else:
            keys.copy_(entries[0])
            values.copy_(entries[1])
        if repeats > 1:
            for each in states:
                copies = each[:, :, at:stop].unflatten(0, (-1, repeats))
                copies[:, 1:] = copies[:, :1]
        return stop


def put_together(segments: Iterable[Segment], states: Pair) -> Pair:
    """Write the tokens of segments into `states`, on the compute device, and return them."""
    at = 0
    for each in segments:
        if each.start < each.end:
            at = each.read_into(states, at)
    return states


def tokens_from(segments: Iterable[Segment], start: int) -> Pair:
    """Copy the tokens from `start` on, none of which is packed, to their device, or to the host if there are two."""
    pairs, at = list[Pair](), 0
    for segment in segments:
        skipped = min(max(start - at, 0), segment.num_tokens)
        at += segment.num_tokens
        if not segment.is_packed:
            pairs.append(repeated(segment.run.read_range(segment.start + skipped, segment.end), segment.repeats))
    devices = {keys.device for keys, _ in pairs}
    device = devices.pop() if len(devices) == 1 else "cpu"
    keys, values = (torch.cat([each.to(device) for each in states], dim=2) for states in zip(*pairs, strict=True))
    return keys, values


def in_two(segments: Iterable[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Return the segments in full precision, and those of packed blocks."""
    found = list[Segment](), list[Segment]()
    for each in segments:
        found[each.is_packed].append(each)
    return found


def num_entries(segments: Iterable[Segment]) -> int:
    """Return the number of entries of segments."""
    return sum(each.end - each.start for each in segments)


def entries_of(segments: Iterable[Segment], start: int, end: int) -> Iterator[Segment]:
    """Yield entries `start` to `end` of segments, counted over all of them."""
    at = 0
    for each in segments:
        first, last = each.start + max(start - at, 0), min(each.start + end - at, each.end)
        if first < last:
            yield each._replace(start=first, end=last)
        at += each.end - each.start


def copy_entries(segments: Iterable[Segment], target: Run) -> None:
    """Store the entries of segments after those of a run, which may be theirs: then they are there."""
    for run, start, end, _, repeats in segments:
        if run is not target:
            target.extend_from(run, start, end, repeats)


def rows_of(segments: Sequence[Segment], start: int = 0) -> Pair:
    """Return the rows from entry `start` on, the first one of a row, as they are stored in host memory."""
    run, first = segments[0].run, start
    if not isinstance(run, HostBlocks) or any(each.run is not run for each in segments):
        end = num_entries(segments)
        run, first = HostBlocks.like(run, end - start, segments[0].repeats), 0
        copy_entries(entries_of(segments, start, end), run)
    run.wait_for_copies()
    run.clear_rest()
    keys, values = run.rows()
    return keys[run.keys.rows(first) :], values[run.values.rows(first) :]
