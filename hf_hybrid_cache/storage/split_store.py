"""Keys and values of one layer in two places: both ends of the sequence on the device, the middle elsewhere."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from .cpu_fraction import CpuFraction
from .kv_shape import Pair
from .layout import Layout, Split
from .memory.growth import GRANULE
from .runs.run import HostBlocks, Resident
from .runs.streamed import Streamed
from .scratch import Scratch
from .segments import Segment, copy_entries, entries_of, in_two, num_entries, put_together
from .stats import CacheStats
from .store import Store
from .token_store import RecentStates, TokenStore


class SplitStore(TokenStore):
    """
    Keys and values of one layer whose first and newest tokens are on the device.

    In the order of tokens:
        ends [first tokens]   middle   ends [newest tokens]
    New tokens are written to `ends`. Whole blocks go to the middle when there are too many: first they are written
    there, then they are removed here.

    Args:
        middle: the empty store of the tokens between the ends.
        ends: the run of both ends.
        split: the borders between them.
        scratch: memory in which all states are put together for attention on the device.
        cpu_fraction: fraction of the middle that the CPU attends to, if the rest is streamed.
        stats: records if fewer tokens are on the device than there should be.
    """

    def __init__(
        self,
        middle: Store,
        ends: Resident,
        split: Split,
        scratch: Scratch,
        cpu_fraction: CpuFraction | None,
        stats: CacheStats,
    ):
        self.shape, self.middle, self.ends, self.split = middle.shape, middle, ends, split
        self._choice, self.cpu_fraction, self._scratch, self._stats = middle._choice, cpu_fraction, scratch, stats

    @property
    def is_intact(self) -> bool:
        """Whether the store is whole; it is not after a change that ended half-way."""
        is_whole = not self._is_changing and self.ends.num_entries + self.middle.num_tokens == self.num_tokens
        return is_whole and self.ends.is_intact and self.middle.is_intact

    @property
    def layout(self) -> Layout:
        """Layout of the middle."""
        return self.middle.layout

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tokens in full precision that wait for the choice of the codec."""
        return self.middle.waiting_bytes

    @property
    def streamed(self) -> Streamed | None:  # type: ignore[override]
        return self.middle.streamed

    @property
    def first_tokens(self) -> int:
        """Number of tokens in `ends` that come before all others."""
        return min(self.split.first_tokens, self.ends.num_entries)

    def settled_after(self, lengths: Sequence[int]) -> int:
        first, middle = self.split.first_tokens, self.split.growing(lengths, self.middle.num_tokens)
        return first + self.middle.settled_after(middle) if lengths[-1] >= first else 0

    def segments(self) -> list[Segment]:
        ends, first = self.ends, self.first_tokens
        return [Segment(ends, 0, first), *self.middle.segments(), Segment(ends, first, ends.num_entries)]

    def host_tokens_with(self, new_tokens: int) -> int:
        """Return how many tokens will be in the middle with so many more of the sequence."""
        return self.split.host_tokens(self.num_tokens + new_tokens, self.middle.num_tokens)

    def read(self) -> Pair:
        return super().read() if self.middle.num_tokens else self.ends.read()

    def staged_range(self) -> tuple[int, int]:
        """Return the range of tokens in the middle that the device uses now, counted from the first of them."""
        streamed, middle = self.middle.streamed, self.middle
        if self.cpu_fraction is None or streamed is None:
            return 0, middle.num_tokens
        start, end = streamed.streamed_from, streamed.num_entries
        if middle.packed is None:
            return start, end
        sinks = middle.layout.own_sink_tokens
        return sinks + start * GRANULE, sinks + end * GRANULE

    def read_staged(self) -> Pair:
        """Return the states of `staged_range`, on the device; call it once for each `add` for a use there."""
        streamed = self.middle.streamed
        if self.cpu_fraction is None or streamed is None:
            return self.middle.read()
        staged = Segment(streamed, streamed.streamed_from, streamed.num_entries, self._choice)
        if self._choice is None:
            states = streamed.read(staged.start, staged.end)
        else:
            states = put_together([staged], self._scratch.lend_states(self.shape, staged.num_tokens))
        # Each use prepares the next one.
        streamed.stream_from(self.cpu_fraction.blocks(streamed.num_blocks))
        return states

    def note_ended(self, cpu_was_last: bool) -> None:
        """Note whether the CPU was the last to end, if the CPU fraction adapts."""
        assert self.cpu_fraction is not None
        self.cpu_fraction.note(cpu_was_last, self.num_tokens)

    def settle(self) -> None:
        self.middle.settle()

    def add(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        self._scratch.release()
        # Memory that may be refused is taken before anything changes, and lent again when it is used.
        room = self._room_for_staged(keys.shape[2]) if on_device else None
        self.write(keys, values, on_device)
        del room

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False, host_tokens: int | None = None
    ) -> None:
        """Let new states go to the ends, and those that leave them to the middle, which has `host_tokens` then."""
        ends, middle, held, new_tokens = self.ends, self.middle, self.ends.num_entries, keys.shape[2]
        count = (self._make_room(new_tokens) if host_tokens is None else host_tokens) - middle.num_tokens
        self.is_staged = on_device
        if not count:
            if middle.num_tokens and middle.streamed is not None:
                middle.stage(on_device)
            try:
                ends.write(keys, values)
                self._set_length(self.num_tokens + new_tokens)
            except BaseException:
                if ends.num_entries + middle.num_tokens > self.num_tokens:
                    ends.truncate(held)
                raise
            return
        first = self.first_tokens
        missing = min(self.split.first_tokens - first, new_tokens)
        removed = min(count, held - first)
        left = missing + count - removed
        leaving = keys[:, :, missing:left], values[:, :, missing:left]
        if removed:
            ends.leave_to_holders(held)
            # A copy, because its own copy to the host may still run when others take their places.
            old_keys, old_values = ends.read_range(first, first + removed)
            leaving = torch.cat([old_keys, leaving[0]], dim=2), torch.cat([old_values, leaving[1]], dim=2)
            del old_keys, old_values  # or `ends` would leave its memory to them
        middle.write(*leaving, on_device)
        with self._changing():
            if removed:
                ends.remove(first, first + removed)
            for start, end in ((0, missing), (left, new_tokens)):
                ends.write(keys[:, :, start:end], values[:, :, start:end])
            self._set_length(self.num_tokens + new_tokens)

    def recent_states(self) -> RecentStates:
        return super().recent_states()._replace(host_tokens=self.middle.num_tokens)

    def extend_recent(self, recent: RecentStates) -> None:
        """Store recent states again after the tokens that were before them, each where it was."""
        if recent.host_tokens is None:
            super().extend_recent(recent)
            return
        self._scratch.release()
        self.ends.reserve(self.num_tokens + recent.states[0].shape[2] - recent.host_tokens)
        self.write(*recent.states, host_tokens=recent.host_tokens)

    def run_for(self, part: str, num_entries: int) -> HostBlocks:
        """Return an empty run in host memory for entries of a part, see `Store`."""
        return self.middle.run_for(part, num_entries) if part == "packed" else HostBlocks.like(self.ends, num_entries)

    def take_from(self, other: TokenStore) -> None:
        """Store the states of another store in this empty one, see `Store`."""
        other.settle()
        self.take(other.segments())

    def take(self, segments: Sequence[Segment]) -> None:
        """Store the entries of segments in this empty store, see `Store`."""
        full, packed = in_two(segments)
        count = num_entries(full)
        first = min(self.split.first_tokens, count)
        in_middle = self.split.host_tokens(count)
        if num_entries(packed):
            # Recent tokens follow the quantized blocks, as they did when these were quantized.
            in_middle = max(in_middle, min(self.layout.most_full_tokens - GRANULE, count - first))
        end = first + in_middle
        self.middle.take([*entries_of(full, first, end), *packed])
        copy_entries(entries_of(full, 0, first), self.ends)
        copy_entries(entries_of(full, end, count), self.ends)
        self._set_length(self.ends.num_entries + self.middle.num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`, which are at most as many as there are."""
        host_tokens = min(self.middle.num_tokens, max(0, num_tokens - self.split.first_tokens))
        if host_tokens < self.middle.num_tokens:
            self.middle.truncate(host_tokens)
        with self._changing():
            self.ends.truncate(num_tokens - host_tokens)
            self._set_length(num_tokens)

    def select(self, indices: torch.Tensor) -> None:
        self.settle()
        with self._changing():
            self.middle.select(indices)
            self.ends.select(indices)
            self.shape = self.middle.shape
            self.version += 1

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        """Return the device and bytes of each buffer after this empty store had grown to each of `lengths`."""
        middle = self.split.growing(lengths)
        yield from self.ends.planned_bytes([length - there for length, there in zip(lengths, middle, strict=True)])
        yield from self.middle.planned_bytes(middle)

    def _make_room(self, new_tokens: int) -> int:
        """
        Grow `ends` for the tokens that stay there. If memory is refused, fewer stay from now on.

        Returns:
            Number of tokens in the middle with the new ones.
        """
        num_tokens = self.num_tokens + new_tokens
        while True:
            host_tokens = self.split.host_tokens(num_tokens, self.middle.num_tokens)
            try:
                self.ends.reserve(num_tokens - host_tokens)
                return host_tokens
            except torch.OutOfMemoryError:
                device_tokens = self.split.device_tokens
                fewer = max(self.ends.capacity, device_tokens // 2) // GRANULE * GRANULE
                if not self.split.first_tokens + GRANULE <= fewer < device_tokens:
                    raise
                warnings.warn(
                    f"The device ran out of memory: of some layers it keeps {fewer:,} tokens from now on, not "
                    f"{device_tokens:,}. Use fewer device_tokens, or a smaller prefill_chunk_size in generate.",
                    stacklevel=2,
                )
                self.split = replace(self.split, device_tokens=fewer)
                reason = "the device has no memory for more"
                self._stats.note_decision(self.num_tokens, "device_tokens", fewer, reason)

    def _room_for_staged(self, new_tokens: int) -> Pair | None:
        """Lend memory in which streamed blocks will be dequantized; return `None` if none are."""
        held = self.middle.num_tokens
        if self._choice is None or self.middle.waiting_bytes:
            return None
        start, end = self.staged_range()
        more = self.split.host_tokens(self.num_tokens + new_tokens, held) - held
        return self._scratch.lend_states(self.shape, end - start + more)
