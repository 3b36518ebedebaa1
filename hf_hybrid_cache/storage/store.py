"""Keys and values of one layer in segments: on the device, in full precision and quantized."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from .arrival import Arrival, choose_codec
from .buffers.token_buffer import TokenBuffer
from .codec import KVCodec
from .kv_store import KVShape, KVStore, Pair
from .layer_reading import put_middle_together, put_together
from .layout import Layout
from .memory.growth import GRANULE
from .part import Part, Piece
from .quantized_segment import QuantizedSegment
from .recent_states import RecentStates
from .runs.host_blocks import HostBlocks
from .runs.resident import Resident
from .runs.run import Run
from .runs.streamed import Streamed
from .scratch import Scratch
from .shard import Shard
from .streaming.cpu_fraction import CpuFraction
from .streaming.stats import CacheStats

if TYPE_CHECKING:
    from .shared_prefix import AnyStore

_Result = TypeVar("_Result")
# Adds keys and values to a segment.
_Add = Callable[[torch.Tensor, torch.Tensor], _Result]


class Store(KVStore):
    """
    Keys and values of one layer, in one to three segments.

    In the order of tokens, where any but one may be missing:
        on_device [first tokens]   full [sinks]   quantized   full [recent tokens]   on_device [recent tokens]
    The last ones follow the first ones in a segment. New tokens come at the end. Where the layout moves a border, whole
    blocks go to the segment before it: they are copied first, and the border moves last.

    Args:
        shape: of the states.
        layout: layout of the empty store.
        full: segment of tokens in full precision.
        scratch: memory in which all states are put together for attention on the device.
        quantized: segment of quantized blocks.
        on_device: segment of both ends, if the middle is elsewhere.
        cpu_fraction: fraction of the middle that the CPU attends to, if the rest is streamed.
        stats: records if fewer tokens are on the device than there should be.

    Attributes:
        layout: borders between the tokens.
        num_tokens: tokens of the sequence, of which a shard may hold some.
        is_staged: the last tokens were stored for a use on the device.
    """

    is_continued: Literal[False] = False

    def __init__(
        self,
        shape: KVShape,
        layout: Layout,
        full: Run,
        scratch: Scratch,
        quantized: QuantizedSegment | None = None,
        on_device: Resident | None = None,
        cpu_fraction: CpuFraction | None = None,
        stats: CacheStats | None = None,
    ):
        super().__init__(shape)
        self.dense, self.quantized, self.ends = full, quantized, on_device
        # Until the codec is chosen every process keeps all tokens, so that all choose by the same states.
        self._own = layout.shard
        self.layout = layout if quantized is None or quantized.is_chosen else replace(layout, shard=Shard.ALL)
        self.cpu_fraction = cpu_fraction
        self.is_staged = on_device is None and self.streamed is not None
        self._scratch = scratch
        self._stats = stats

    def __deepcopy__(self, memo: dict) -> "Store":
        self.wait_for_copies()
        twin = copy.copy(self)
        memo[id(self)] = twin
        memo |= {
            id(states): states.clone() for pair in self.pending for states in pair
        }  # without what they are views of
        twin.dense, twin.quantized, twin.ends = copy.deepcopy((self.dense, self.quantized, self.ends), memo)
        twin.cpu_fraction = copy.deepcopy(self.cpu_fraction, memo)
        twin._scratch, twin._stats = copy.deepcopy((self._scratch, self._stats), memo)
        return twin

    @property
    def is_intact(self) -> bool:
        if self._is_changing or not self.dense.is_intact:
            return False
        middle, held = self.num_tokens, self.dense.num_entries
        on_device, quantized = self.ends, self.quantized
        if on_device is not None:
            middle = self.layout.host_tokens
            if not on_device.is_intact or on_device.num_entries + middle != self.num_tokens:
                return False
        if quantized is not None:
            if not quantized.packed.is_intact or quantized.num_blocks != self.layout.own_quantized_blocks:
                return False
            held += quantized.num_blocks * GRANULE + (quantized.pending_tokens if quantized.pending else 0)
        return held == self.layout.shard.tokens(middle)

    @property
    def segments(self) -> list[Run]:
        """The segments, that of packed blocks among them."""
        packed = None if self.quantized is None else self.quantized.packed
        return [segment for segment in (self.ends, self.dense, packed) if segment is not None]

    @property
    def has_one_segment(self) -> bool:
        """Whether all tokens are in one segment, so that nothing is put together."""
        return self.quantized is None and self.ends is None

    @property
    def bulk(self) -> Run:
        """The segment that grows with the sequence, which is streamed if any is."""
        return self.dense if self.quantized is None else self.quantized.packed

    @property
    def packed(self) -> Run | None:
        """The run of packed blocks; `None` if the layer is not quantized."""
        return None if self.quantized is None else self.quantized.packed

    @property
    def codec(self) -> KVCodec | None:
        """The codec, asked for or chosen; `None` if the layer is not quantized."""
        return None if self.quantized is None else self.quantized.codec

    @property
    def streamed(self) -> Streamed | None:
        """The segment of the tokens, or packed blocks, that are streamed to the device."""
        return self.bulk if isinstance(self.bulk, Streamed) else None

    @property
    def middle_tokens(self) -> int:
        """Number of own tokens that are not in `on_device`."""
        quantized = self.quantized
        others = 0 if quantized is None else quantized.num_blocks * GRANULE + quantized.pending_tokens
        return self.dense.num_entries + others

    @property
    def first_tokens(self) -> int:
        """Number of tokens in `on_device` that come before all others."""
        return 0 if self.ends is None else min(self.layout.first_tokens, self.ends.num_entries)

    @property
    def sink_tokens(self) -> int:
        """Number of tokens in `full` that come before quantized blocks."""
        return self.layout.own_sink_tokens

    @property
    def wants_queries(self) -> bool:
        """Whether the store needs queries to choose its codec."""
        return self.quantized is not None and not self.quantized.is_chosen

    @property
    def pending(self) -> tuple[Pair, ...]:
        """The pending states, in pieces."""
        return () if self.quantized is None else self.quantized.pending

    @property
    def pending_bytes(self) -> int:
        """Bytes of pending states."""
        return 0 if self.quantized is None else self.quantized.pending_bytes

    def observe(self, query: torch.Tensor) -> None:
        """Take note of queries that attend to these states, `[batch, query_heads, query_length, head_dim]`."""
        if self.quantized is not None:
            self.quantized.observe(query)
            self.settle()

    def settle(self) -> None:
        """
        Store the pending states, if there are any; choose the codec first.

        Raises:
            ValueError: there are no codes for some of them.
            HostMemoryError: the host has no room for them.
        """
        quantized = self.quantized
        if quantized is None or not quantized.pending:
            return
        pending_tokens, version = quantized.pending_tokens, self.version
        if not quantized.is_chosen:
            choose_codec(self, *quantized.pending_states())
            self._keep_own()
        states = quantized.pending_states()
        with self._changing():
            quantized.pending = ()
            if self.ends is None:
                self.num_tokens -= pending_tokens
        back = pending_tokens if self.ends is None else 0
        layout = self.layout.with_due_blocks(self.num_tokens + back)
        arrival = Arrival(layout, back, states).with_quantized(self)
        self._store(arrival, quantized.packed.write)
        self.version = version  # handles still stand for the same tokens

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new states and return all, put together; return the new ones as they are if there are no others."""
        self.settle()
        only_these, num_tokens = self.num_tokens == 0, self.num_tokens + keys.shape[2]
        if self.has_one_segment:
            self.is_staged = True
            everything = _add_to(self.dense, self.dense.append, self._own_part(keys, values))
            self._set_length(num_tokens)
            return everything
        layout = self._make_room(keys.shape[2])
        if self.ends is not None and not layout.host_tokens:
            self._extend_newest(self.ends, keys, values)
            return (keys, values) if only_these else self.ends.read()
        self.is_staged = True
        arrival: Arrival | None = None
        if self.ends is None or layout is not self.layout:
            arrival = self._arrival(layout, keys, values, may_wait=self.middle_tokens == 0)
        # Memory that may be refused is taken before anything changes.
        states: Pair | None = None
        if not only_these:
            states = self._scratch.lend_states(self.shape, layout.shard.tokens(num_tokens))
        bulk: Pair | None = None
        if arrival is None:
            assert self.ends is not None
            self._extend_newest(self.ends, keys, values)
        else:
            is_added = arrival.pending is None and (arrival.moves or self.ends is None)
            bulk = self._store(arrival, self.bulk.append if is_added else None)
        return (keys, values) if states is None else put_together(self, states, bulk)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._release_scratch()
        was_staged, self.is_staged = self.is_staged, False
        self._add(keys, values, lambda: self.bulk.write, in_any_case=was_staged)

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._release_scratch()
        # Memory that may be refused is taken before anything changes, and lent again when it is used.
        room = self._room_for_staged(keys.shape[2])
        self.is_staged = True
        self._add(keys, values, lambda: self.bulk.stage, in_any_case=True)
        del room

    def staged_range(self) -> tuple[int, int]:
        """Return the range of tokens in the middle that the device uses now, counted from the first of them."""
        if self.cpu_fraction is None:
            return 0, self.middle_tokens
        start, end = self.bulk.staged_range()
        if self.quantized is None:
            return start, end
        return self.sink_tokens + start * GRANULE, self.sink_tokens + end * GRANULE

    def read_staged(self) -> Pair:
        """Return the states of `staged_range`, on the device; call it once for each `stage`."""
        start, end = self.staged_range()
        streamed = self.streamed
        if self.cpu_fraction is None or streamed is None:
            return self.read_middle()
        if self.quantized is None:
            states = self.dense.read_staged()
        else:
            states = self._scratch.lend_states(self.shape, end - start)
            self.quantized.decode(self.quantized.packed.read_staged(), states)
        # Each use prepares the next one.
        streamed.stream_from(self.cpu_fraction.blocks(streamed.num_blocks))
        return states

    def note_ended(self, cpu_was_last: bool) -> None:
        """Note whether the CPU was the last to end, if the CPU fraction adapts."""
        assert self.cpu_fraction is not None
        self.cpu_fraction.note(cpu_was_last, self.num_tokens)

    def read(self) -> Pair:
        if self.has_one_segment:
            return self.dense.read()
        if self.ends is not None and not self.middle_tokens:
            return self.ends.read()
        on_device = 0 if self.ends is None else self.ends.num_entries
        return put_together(self, self._scratch.lend_states(self.shape, on_device + self.middle_tokens))

    def read_copy(self) -> Pair:
        if self.quantized is None or self.ends is not None or not self.layout.shard.is_all:
            return super().read_copy()
        return put_together(self, Scratch(self.shape.device).lend_states(self.shape, self.middle_tokens))

    def read_middle(self) -> Pair:
        """Return the states that are not in `on_device`, on the compute device."""
        if self.quantized is None:
            return self.dense.read()
        states = self._scratch.lend_states(self.shape, self.middle_tokens)
        put_middle_together(self, states)
        return states

    @property
    def indexed(self) -> "Store":
        """The store whose keys a key index covers."""
        return self

    def indices_of_indexed(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the sequences of `indexed` that a selection of sequences leaves; `None` if they stay as they are."""
        return indices

    @property
    def indexed_blocks(self) -> range:
        """The numbers of those blocks of the middle that a key index covers."""
        return self.layout.middle.indexed_blocks(self.middle_tokens)

    @property
    def num_shareable(self) -> int:
        """Number of first tokens, in whole blocks, that later tokens do not change once nothing is pending."""
        layout = self.layout.with_due_blocks(self.num_tokens) if self.pending else self.layout
        return layout.settled_tokens(self.num_tokens)

    def recent_states(self) -> RecentStates:
        """Copy the states that later tokens would quantize; those of a split layer to host memory."""
        start = self.layout.settled_tokens(self.num_tokens)
        self.wait_for_copies()
        before = self.layout.cropped(start)
        middle = start if self.ends is None else before.host_tokens
        first, num_full = middle - before.quantized_blocks * GRANULE, self.dense.num_entries
        keys, values = self.dense.read_range(min(first, num_full), num_full)
        skipped = max(0, first - num_full)
        for pair in self.pending:
            keys, values = (
                torch.cat([old, new[:, :, skipped:].to(old.device)], dim=2)
                for old, new in zip((keys, values), pair, strict=True)
            )
            skipped = max(0, skipped - pair[0].shape[2])
        if self.ends is None:
            return RecentStates(start, None, keys.clone(), values.clone())
        on_device = self.ends.read_range(min(start, self.layout.first_tokens), self.ends.num_entries)
        keys, values = (
            torch.cat([old.cpu(), new.cpu()], dim=2) for old, new in zip((keys, values), on_device, strict=True)
        )
        return RecentStates(start, self.layout.host_tokens, keys, values)

    def extend_recent(self, recent: RecentStates) -> None:
        """Store recent states again after the tokens that were before them, where the layout had them."""
        if self.ends is None or recent.host_tokens is None:
            self.extend(*recent.states)
            return
        self._release_scratch()
        in_host = recent.host_tokens - self.layout.host_tokens
        self.ends.reserve(self.ends.num_entries + recent.keys.shape[2] - in_host)
        with self._changing():
            self.dense.write(*(states[:, :, :in_host] for states in recent.states))
            self.ends.write(*(states[:, :, in_host:] for states in recent.states))
            self.layout = replace(self.layout, host_tokens=recent.host_tokens)
            self._set_length(self.num_tokens + recent.keys.shape[2])

    def parts(self) -> dict[str, Part]:
        """Return the stored entries by their names in a file, the same for stores of the same states and codes."""
        full = Part.whole(self.dense)
        if self.pending:
            held = HostBlocks.like(self.dense, sum(keys.shape[2] for keys, _ in self.pending))
            for keys, values in self.pending:
                held.write(keys.cpu(), values.cpu())
            full = Part(self.dense, (*full.runs, *Part.whole(held).runs))
        if self.ends is not None:
            first, end = self.first_tokens, self.ends.num_entries
            full = Part(self.dense, (Piece(self.ends, 0, first), *full.runs, Piece(self.ends, first, end)))
        return {"states": full} if self.quantized is None else {"full": full, "packed": Part.whole(self.bulk)}

    def take_parts(self, parts: Mapping[str, Run]) -> None:
        """
        Store the entries of `parts` in this empty store; its own segments may be among them, already filled.

        Raises:
            ValueError: no sequence has so many entries.
        """
        states, blocks = parts["states" if self.quantized is None else "full"], 0
        if self.quantized is not None:
            blocks = parts["packed"].num_entries
            self.layout.require_entries(states.num_entries, blocks)
            self.quantized.fit()
            if parts["packed"] is not self.quantized.packed:
                self.quantized.packed.extend_from(parts["packed"], 0, blocks)
        num_tokens = states.num_entries + blocks * GRANULE
        self.layout = self.layout.holding(states.num_entries, blocks)
        first, end = 0, states.num_entries
        if self.ends is not None:
            first = min(self.layout.first_tokens, states.num_entries)
            end = first + self.layout.host_tokens - blocks * GRANULE
            self.ends.extend_from(states, 0, first)
            self.ends.extend_from(states, end, states.num_entries)
        if states is not self.dense:
            self.dense.extend_from(states, first, end)
        self._set_length(num_tokens)
        if not self.wants_queries or self.layout.with_due_blocks(num_tokens) is self.layout:
            return
        assert self.quantized is not None
        keys, values = self.dense.read()
        self.quantized.pending = ((keys.clone(), values.clone()),)
        self.dense.truncate(0)

    def take_from(self, other: "AnyStore") -> None:
        """Store the states of another store of the same kind, for another device or type, in this empty one."""
        other.settle()
        self.take_parts({name: part.in_one_segment() for name, part in other.parts().items()})

    def buffers(self) -> Iterable[TokenBuffer]:
        return [buffer for segment in self.segments for buffer in segment.buffers()]

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        """Return the device and bytes of each buffer after this empty store had grown to each of `lengths`."""
        layouts = self.layout.growing(lengths)
        middle = lengths
        if self.ends is not None:
            middle = [each.host_tokens for each in layouts]
            yield from self.ends.planned_bytes([n - there for n, there in zip(lengths, middle, strict=True)])
        if self.quantized is None:
            yield from self.dense.planned_bytes([self.layout.shard.tokens(n) for n in middle])
        else:
            yield from self.dense.planned_bytes([self.layout.most_full_tokens])
            yield from self.quantized.packed.planned_bytes([each.own_quantized_blocks for each in layouts])

    def truncate(self, num_tokens: int) -> None:
        layout = self.layout.cropped(num_tokens)
        if self.ends is None or layout.host_tokens < self.layout.host_tokens:
            self.settle()
            layout = self.layout.cropped(num_tokens)
            self._truncate_middle(num_tokens if self.ends is None else layout.host_tokens, layout)
        with self._changing():
            if self.ends is not None:
                self.ends.truncate(num_tokens - layout.host_tokens)
            self.layout = layout
            self._set_length(num_tokens)

    def select_batch(self, indices: torch.Tensor) -> None:
        self.settle()
        with self._changing():
            if self.ends is not None:
                self.ends.select(indices)
            self.dense.select(indices)
            if self.quantized is not None:
                self.quantized.select(indices)
            self.shape = self.shape._replace(batch=len(indices))
            self.version += 1

    def wait_for_copies(self) -> None:
        for segment in self.segments:
            segment.wait_for_copies()

    def wait_until_stored(self) -> None:
        for segment in self.segments:
            segment.wait_until_stored()

    def close(self) -> None:
        super().close()
        for segment in self.segments:
            segment.close()
        if self.quantized is not None:
            self.quantized.pending = ()
        self._release_scratch()

    def _release_scratch(self) -> None:
        if not self.has_one_segment:
            self._scratch.release()

    def _own_part(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        shard, start = self.layout.shard, self.num_tokens
        return (keys, values) if shard.is_all else (shard.part(keys, start), shard.part(values, start))

    def _add(
        self, keys: torch.Tensor, values: torch.Tensor, add_to_bulk: Callable[[], _Add[None]], in_any_case: bool
    ) -> None:
        """
        Store new states; what goes to the bulk segment is added by what `add_to_bulk` returns.

        It is added `in_any_case`, even if nothing goes there. `add_to_bulk` is asked late, because a codec that was
        chosen replaces the segment.
        """
        if self.quantized is not None and self.quantized.is_chosen:  # something ended the update that chose it
            self.settle()
        newest = self.dense if self.ends is None else self.ends
        if newest is self.bulk:
            self._extend_newest(newest, keys, values, add_to_bulk())
            return
        layout = self._make_room(keys.shape[2])
        if in_any_case:
            layout = layout.with_due_blocks(self.num_tokens + keys.shape[2])
        if layout is self.layout and not (in_any_case and self.streamed is not None):  # most decode steps
            self._extend_newest(newest, keys, values)
            return
        arrival = self._arrival(layout, keys, values, may_wait=True)
        is_added = arrival.pending is None and (arrival.moves or in_any_case)
        self._store(arrival, add_to_bulk() if is_added else None)

    def _extend_newest(
        self, newest: Run, keys: torch.Tensor, values: torch.Tensor, extend: _Add[None] | None = None
    ) -> None:
        """Store new states in the segment of the newest tokens, where nothing else moves."""
        _add_to(newest, extend or newest.write, self._own_part(keys, values))
        self._set_length(self.num_tokens + keys.shape[2])

    def _arrival(self, layout: Layout, keys: torch.Tensor, values: torch.Tensor, may_wait: bool) -> Arrival:
        """
        Decide where new states go, with which the layout is `layout`; nothing is stored yet, and memory is reserved.

        With `may_wait` states that are due wait for the choice of the codec.
        """
        arrival = Arrival(layout, keys.shape[2], self._own_part(keys, values))
        if self.ends is not None:
            arrival = arrival.through_device(self, keys, values)
        if self.quantized is None:
            return arrival
        is_due = arrival.layout.quantized_blocks != self.layout.quantized_blocks
        if may_wait and is_due and not self.quantized.is_chosen:
            return arrival.waiting(self)
        return arrival.with_quantized(self)

    def _make_room(self, new_tokens: int) -> Layout:
        """
        Grow `on_device` for the tokens that stay there. If memory is refused, fewer stay from now on.

        Returns:
            The layout with the new tokens.
        """
        num_tokens = self.num_tokens + new_tokens
        while True:
            layout = self.layout.after(num_tokens)
            if self.ends is None:
                return layout
            try:
                self.ends.reserve(num_tokens - layout.host_tokens)
                return layout
            except torch.OutOfMemoryError:
                device_tokens = self.layout.device_tokens
                fewer = max(self.ends.capacity, device_tokens // 2) // GRANULE * GRANULE
                if not self.layout.first_tokens + GRANULE <= fewer < device_tokens:
                    raise
                warnings.warn(
                    f"The device ran out of memory: of some layers it keeps {fewer:,} tokens from now on, not "
                    f"{device_tokens:,}. Use fewer device_tokens, or a smaller prefill_chunk_size in generate.",
                    stacklevel=2,
                )
                self.layout = replace(self.layout, device_tokens=fewer)
                if self._stats is not None:
                    reason = "the device has no memory for more"
                    self._stats.note_decision(self.num_tokens, "device_tokens", fewer, reason)

    def _store(self, arrival: Arrival, add_to_bulk: _Add[_Result] | None) -> _Result | None:
        """Let `add_to_bulk` take what goes to the bulk segment, then store the rest; the border moves last."""
        bulk = None if add_to_bulk is None else _add_to(self.bulk, add_to_bulk, arrival.bulk)
        with self._changing():
            if arrival.pending is not None:
                assert self.quantized is not None
                self.quantized.pending = (*self.quantized.pending, arrival.pending)
            elif arrival.recent is not None:
                self.dense.truncate(arrival.kept)
                self.dense.write(*arrival.recent)
            if self.ends is not None:
                if arrival.removed:
                    first = self.first_tokens
                    self.ends.remove(first, first + arrival.removed)
                for states in arrival.staying:
                    self.ends.write(*states)
            self.layout = arrival.layout
            self._set_length(self.num_tokens + arrival.new_tokens)
        return bulk

    def _keep_own(self) -> None:
        """Drop the tokens of other shards, before anything is quantized."""
        if self._own.is_all:
            return
        assert self.quantized is not None
        own, start, version = self._own, self.dense.num_entries, self.version
        with self._changing():
            keys, values = (own.part(states, 0) for states in self.dense.read_range(0, start))
            of_keys, of_values = (own.part(states, start) for states in self.quantized.pending_states())
            self.quantized.pending = ((of_keys, of_values),)
            self.dense.truncate(0)
            self.dense.write(keys, values)
            self.layout = replace(self.layout, shard=own)
            self.version = version  # handles still stand for the whole layer

    def _room_for_staged(self, new_tokens: int) -> Pair | None:
        """Lend memory in which streamed blocks will be dequantized; return `None` if none are."""
        if self.ends is None or self.quantized is None or self.pending_bytes:
            return None
        start, end = self.staged_range()
        more = self.layout.after(self.num_tokens + new_tokens).host_tokens - self.middle_tokens
        return self._scratch.lend_states(self.shape, end - start + more)

    def _truncate_middle(self, num_tokens: int, layout: Layout) -> None:
        """Keep the own part of the first tokens of the middle."""
        own = layout.shard.tokens(num_tokens)
        if self.quantized is None:
            self.dense.truncate(own)
            return
        first, kept = min(own, self.sink_tokens), layout.own_quantized_blocks
        if kept == self.quantized.num_blocks:
            self.dense.truncate(own - kept * GRANULE)
            return
        self.wait_for_copies()
        rest = [states[:, :, : own - first - kept * GRANULE] for states in self.quantized.dequantized(kept, kept + 1)]
        with self._changing():
            self.dense.truncate(first)
            self.dense.write(*rest)
            self.quantized.packed.truncate(kept)


def _add_to(segment: Run, add: _Add[_Result], states: Pair) -> _Result:
    """Let `add` store states in a segment, and remove them if something ends it half-way."""
    before = segment.num_entries
    try:
        return add(*states)
    except BaseException:
        segment.truncate(before)  # these tokens are in another segment still, or new
        raise
