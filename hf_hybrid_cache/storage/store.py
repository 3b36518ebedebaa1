"""Keys and values of one layer in one place, as tokens come and go: where new ones are, and when blocks are packed."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from .codec import CodecChoice
from .kv_shape import KVShape, Pair
from .layout import Layout, Shard
from .memory.growth import GRANULE
from .memory.host_memory import HostMemoryError
from .runs.run import HostBlocks, Run
from .runs.streamed import Streamed
from .scratch import Scratch
from .segments import Segment, copy_entries, in_two, put_together
from .token_store import TokenStore


class Runs(Protocol):
    """Interface of what makes the runs of a layer, where its placement says."""

    def dense(self, shape: KVShape, layout: Layout) -> Run:
        """Make an empty run of tokens in full precision."""

    def packed(self, shape: KVShape) -> Run:
        """Make an empty run of packed blocks of this shape."""


class Store(TokenStore):
    """
    Keys and values of one layer, or of the middle of one, in one place: a run, or two if it is quantized.

    In the order of tokens, where a layer in full precision has `dense` alone:
        dense [sinks]   packed   dense [recent tokens]
    New tokens are written to `dense`. Blocks of it are packed when they are due: at once if the codec is chosen,
    otherwise when `settle` chooses it. They are packed first, and the border moves last.

    Args:
        shape: of the states.
        layout: layout of the empty store.
        runs: makes its runs.
        scratch: memory in which all states are put together for attention on the device.
        choice: the codec of a quantized layer, given or still to be chosen.
        dense: the run of its first tokens, if they are there already.

    Attributes:
        layout: borders between the tokens.
        dense: tokens in full precision.
        packed: packed blocks; `None` if the layer is not quantized.
        streamed: the run that grows with the sequence, if it is streamed to the device.
        blocks: the record of tokens in host memory that kernels read; attention makes it and keeps it true.
        num_hidden: first tokens of `dense` that the first of the tokens which were written last does not see.
    """

    blocks: Any = None
    num_hidden = 0

    def __init__(
        self,
        shape: KVShape,
        layout: Layout,
        runs: Runs,
        scratch: Scratch,
        choice: CodecChoice | None = None,
        dense: Run | None = None,
    ):
        self.shape = shape
        self._runs, self._choice, self._scratch = runs, choice, scratch
        # Until the codec is chosen every process keeps all tokens, so that all choose by the same states.
        self._own = layout.shard
        self.layout = layout if choice is None or choice.is_made else replace(layout, shard=Shard.ALL)
        self.dense = runs.dense(shape, layout) if dense is None else dense
        self.num_tokens = self.dense.num_entries
        self.packed = None if choice is None else runs.packed(choice.packed_shape(shape))
        self._note_streamed()

    @property
    def is_intact(self) -> bool:
        """Whether the store is whole; it is not after a change that ended half-way."""
        dense, packed, layout = self.dense, self.packed, self.layout
        if self._is_changing or not dense.is_intact:
            return False
        held = dense.num_entries
        if packed is not None:
            if not packed.is_intact or packed.num_entries != layout.own_quantized_blocks:
                return False
            held += packed.num_entries * GRANULE
        return held == (self.num_tokens if layout.shard.size == 1 else layout.shard.tokens(self.num_tokens))

    @property
    def waiting_bytes(self) -> int:
        waits = self.wants_queries and self.num_tokens >= self.layout.changes_at
        return self.dense.num_entries * self.dense.bytes_per_token if waits else 0

    @property
    def own_tokens(self) -> int:
        return self.dense.num_entries + (0 if self.packed is None else self.packed.num_entries * GRANULE)

    def settled_after(self, lengths: Sequence[int]) -> int:
        return self.layout.after(lengths[-1]).settled_tokens(lengths[-1])

    @property
    def runs(self) -> Sequence[Run]:
        return (self.dense,) if self.packed is None else (self.dense, self.packed)

    def segments(self) -> list[Segment]:
        dense, packed = self.dense, self.packed
        if packed is None:
            return [Segment(dense, 0, dense.num_entries)]
        sinks = min(dense.num_entries, self.layout.own_sink_tokens)
        return [
            Segment(dense, 0, sinks),
            Segment(packed, 0, packed.num_entries, self._choice),
            Segment(dense, sinks, dense.num_entries),
        ]

    def read(self) -> Pair:
        if self.packed is None:
            return self.dense.read()
        return put_together(self.segments(), self._scratch.lend_states(self.shape, self.own_tokens))

    def in_pieces(self, size: int) -> Iterator[tuple[int, Pair]]:
        """Yield the states in pieces of at most `size`, whole blocks, on their own device, with the first token."""
        self.wait_for_copies()
        at = 0
        for each in self.segments():
            entries = size // each.run.keys.entry_tokens
            for start in range(each.start, each.end, entries):
                end = min(start + entries, each.end)
                states = self._dequantized(start, end) if each.is_packed else each.run.read_range(start, end)
                yield at, states
                at += states[0].shape[2]

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        """Return the device and bytes of each buffer after this empty store had grown to each of `lengths`."""
        if self.packed is None:
            yield from self.dense.planned_bytes([self.layout.shard.tokens(each) for each in lengths])
        else:
            yield from self.dense.planned_bytes([self.layout.most_full_tokens])
            yield from self.packed.planned_bytes([each.own_quantized_blocks for each in self.layout.growing(lengths)])

    def write(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        before, held, choice = self.num_tokens, self.dense.num_entries, self._choice
        num_tokens = before + keys.shape[2]
        layout = self.layout
        if num_tokens >= layout.changes_at:
            layout = layout.after(num_tokens)
        waits = choice is not None and not choice.is_made
        if waits:
            self._prepare_to_wait(keys, values, layout)
        if choice is not None and not before:
            self.dense.reserve(layout.most_full_tokens)
        if layout.shard.size > 1:
            keys, values = layout.shard.part(keys, before), layout.shard.part(values, before)
        try:
            if layout is not self.layout and not waits:
                new = keys.to(self.shape.key_dtype), values.to(self.shape.value_dtype)
                self._pack(layout, num_tokens, new, on_device)
                return
            if choice is not None and self.streamed is not None:
                self.stage(on_device)
            self.dense.write(keys, values, on_device and choice is None)
            self._set_length(num_tokens)
        except BaseException:
            if self.num_tokens == before and not self._is_changing:
                self.dense.truncate(held)
            raise

    def stage(self, on_device: bool) -> None:
        """Tell the run that is streamed, if there is one, where it is used next; it gets no new tokens."""
        streamed = self.streamed
        if streamed is not None and (on_device or streamed.is_streamed):
            streamed.write(*streamed.read_range(0, 0), on_device)

    def add_first(self, keys: torch.Tensor, values: torch.Tensor) -> tuple["Store", Pair | None]:
        """
        Store the first states like `add`.

        Returns:
            A store of them as they came, to attend to; and a copy of them for `observe`, if the codec is to be chosen.
        """
        assert not self.num_tokens
        chunk = self.dense
        assert isinstance(chunk, HostBlocks)
        # Reading it from blocks would take longer than quantizing it.
        came = (keys.clone(), values.clone()) if self.wants_queries else None
        if came is None:
            chunk = HostBlocks.like(chunk, keys.shape[2])
            chunk.write(keys, values)
        self.add(keys, values)
        return Store(self.shape, Layout(), self._runs, self._scratch, dense=chunk), came

    @property
    def is_in_host_blocks(self) -> bool:
        """Whether all tokens of the sequence are in blocks in host memory, packed or not, and none is streamed."""
        return self.streamed is None and self.layout.shard.is_all and isinstance(self.dense, HostBlocks)

    def make_place(self) -> int:
        """
        Have memory for the next tokens; return how many may be written to the last block of `dense`, in one or several
        passes of a kernel that attends to them, too.

        A block that is due once the next token is there is packed first, as `write` packs it. Then the last block is
        full, or another one is due. It is 0 where something else is to be done first: whoever stores the token does
        it, or raises an error.
        """
        choice = self._choice
        if not self.is_intact or self.waits:
            return 0
        try:
            if self.num_tokens + 1 >= self.layout.changes_at:
                if choice is None or not choice.is_made:
                    return 0
                self._pack_due(self.num_tokens + 1)
            self.dense.reserve((self.dense.num_entries // GRANULE + 1) * GRANULE)
        except (HostMemoryError, ValueError):
            return 0
        room = min(self.dense.num_free, GRANULE - self.dense.num_entries % GRANULE)
        return min(room, self.layout.changes_at - 1 - self.num_tokens)

    def hidden_from_next(self) -> int:
        """Return the number of first tokens of `dense` that the next token does not see."""
        return 0

    def note_written(self, count: int) -> None:
        """Count more tokens of each sequence, which were written in their places, see `make_place`."""
        self.dense.num_entries += count
        self._set_length(self.num_tokens + count)

    def forget_uncounted(self, count: int) -> None:
        """Take tokens back that `note_written` has counted in one place only, because it was interrupted."""
        if not self.is_intact:
            self.dense.truncate(self.dense.num_entries - count)

    def settle(self) -> None:
        """
        Pack the blocks that are due, if there are any; choose the codec first.

        Raises:
            ValueError: there are no codes for some of them; nothing has changed then.
            HostMemoryError: the host has no room for them.
        """
        self._settle_from(None)

    def _settle_from(self, came: Pair | None) -> None:
        num_tokens = self.num_tokens
        if self._choice is None or num_tokens < self.layout.changes_at:
            return
        if self._choice.is_made:
            self._pack_due(num_tokens)
            return
        states = self._choose(came)
        # The queries that were seen may still attend to the run as it is.
        self._pack(self.layout.after(num_tokens), num_tokens, states, renews=True)

    def run_for(self, part: str, num_entries: int) -> HostBlocks:
        """Return an empty run in host memory for entries of a part, to be filled: the own one, or a new one."""
        own = self.packed if part == "packed" and self.packed is not None else self.dense
        return own if isinstance(own, HostBlocks) else HostBlocks.like(own, num_entries)

    def take_from(self, other: TokenStore) -> None:
        """Store the states of another store of the same codec, for another device or type, in this empty one."""
        other.settle()
        self.take(other.segments())

    def take(self, segments: Sequence[Segment]) -> None:
        """Store the entries of segments in this empty store; whole runs of its own may be among them, filled."""
        (full, packed), blocks = in_two(segments), 0
        if self.packed is not None:
            self._fit_packed()
            copy_entries(packed, self.packed)
            blocks = self.packed.num_entries
        copy_entries(full, self.dense)
        self.layout = replace(self.layout, quantized_blocks=blocks)
        self._set_length(self.own_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`, which are at most as many as there are."""
        self.settle()
        layout, dense, packed = self.layout.cropped(num_tokens), self.dense, self.packed
        own, kept = layout.shard.tokens(num_tokens), layout.own_quantized_blocks
        last: tuple[Pair, ...] = ()
        if packed is not None and kept < packed.num_entries:
            self.wait_for_copies()
            left = own - min(own, layout.own_sink_tokens) - kept * GRANULE
            keys, values = self._dequantized(kept, kept + 1)
            last, own = ((keys[:, :, :left], values[:, :, :left]),), own - left
        with self._changing():
            dense.truncate(own - kept * GRANULE)
            for states in last:
                dense.write(*states)
            if packed is not None:
                packed.truncate(kept)
            self.layout = layout
            self._set_length(num_tokens)

    def _prepare_to_wait(self, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> None:
        """Take the memory that new states will need once their codec is chosen."""
        assert self.packed is not None
        if layout is not self.layout:
            self.packed.reserve(layout.own_quantized_blocks)
            self._require_finite((keys, values), layout.own_quantized_blocks - self.packed.num_entries)

    def _pack(self, layout: Layout, num_tokens: int, new: Pair, on_device: bool = False, renews: bool = False) -> None:
        """
        Pack the blocks that are due, with new own tokens, of which only those that stay are written to `dense`.

        With `renews` the new ones are all tokens, those of `dense`, too: what stays goes to another run.
        """
        dense, packed, choice = self.dense, self.packed, self._choice
        held = 0 if renews else dense.num_entries
        assert packed is not None
        assert choice is not None
        sinks, before, total = layout.own_sink_tokens, packed.num_entries, held + new[0].shape[2]
        count = (layout.own_quantized_blocks - before) * GRANULE
        packed.reserve(layout.own_quantized_blocks)
        dense.wait_for_copies()

        def read(start: int, end: int) -> Pair:
            if end <= held:
                return dense.read_range(start, end)
            keys, values = (states[:, :, max(0, start - held) : end - held] for states in new)
            if start >= held:
                return keys, values
            old_keys, old_values = (states.to(keys.device) for states in dense.read_range(start, held))
            return torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)

        renews = renews or held > layout.most_full_tokens
        codes = None
        if count:
            try:
                codes = choice.encode(lambda start, end: read(sinks + start, sinks + end), count)
            except ValueError as error:
                raise self._not_finite(count // GRANULE, str(error)) from None
        kept = 0 if renews else min(sinks, held)
        staying = [read(kept, sinks), read(sinks + count, total)]
        if renews:
            target = self._new_dense(*staying)
        else:  # storing them may overwrite their source
            target, staying = dense, [(keys.clone(), values.clone()) for keys, values in staying]
        try:
            if codes is not None:
                packed.write(*codes, on_device)
        except BaseException:
            packed.truncate(before)
            if renews:
                target.close()
            raise
        with self._changing():
            if renews:
                self.dense = target
                dense.close()
            else:
                dense.truncate(kept)
                for pair in staying:
                    dense.write(*pair)
            self.layout = layout
            if num_tokens > self.num_tokens:
                self._set_length(num_tokens)

    def _pack_due(self, num_tokens: int) -> None:
        """Pack the blocks that are due once there are so many tokens."""
        held = self.dense.num_entries
        self._pack(self.layout.after(num_tokens), self.num_tokens, self.dense.read_range(held, held))

    def _choose(self, came: Pair | None) -> Pair:
        """Choose the codec by all states that could be packed now; drop the tokens of other shards; return the own."""
        choice, dense = self._choice, self.dense
        assert choice is not None
        dense.wait_for_copies()
        keys, values = dense.read_range(0, dense.num_entries) if came is None else came
        first = min(self.layout.own_sink_tokens, dense.num_entries)
        due = keys[:, :, first:], values[:, :, first:]
        if came is None:  # those were checked as they came
            self._require_finite(due, due[0].shape[2] // GRANULE - 1)
        choice.make(*due)
        self._fit_packed()
        if not self._own.is_all:
            keys, values = self._own.part(keys, 0), self._own.part(values, 0)
            with self._changing():
                self.dense = self._new_dense((keys, values))
                self.layout = replace(self.layout, shard=self._own)
        return keys, values

    def _fit_packed(self) -> None:
        """Replace the empty run of packed blocks by one for the codec, if their sizes differ."""
        assert self._choice is not None
        assert self.packed is not None
        shape = self._choice.packed_shape(self.shape)
        if shape != self.packed.shape:
            self.packed.close()
            self.packed = self._runs.packed(shape)
            self._note_streamed()

    def _note_streamed(self) -> None:
        growing = self.dense if self.packed is None else self.packed
        self.streamed = growing if isinstance(growing, Streamed) else None

    def _new_dense(self, *states: Pair) -> Run:
        """Make a run of tokens in full precision with these."""
        dense = self._runs.dense(self.shape, self.layout)
        dense.reserve(self.layout.most_full_tokens)
        for pair in states:
            dense.write(*pair)
        return dense

    def _dequantized(self, first: int, last: int) -> Pair:
        """Dequantize the tokens of some packed blocks, on their device; copies must be done."""
        assert self.packed is not None
        assert self._choice is not None
        packed, tokens = self.packed.read_range(first, last), (last - first) * GRANULE
        states = self.shape.empty(tokens, packed[0].device)
        self._choice.decode(packed, states)
        return states

    def _require_finite(self, states: Pair, num_blocks: int) -> None:
        for each in states:
            # A sum is quick, but may be infinite although all numbers are finite.
            if not math.isfinite(each.sum()) and not torch.isfinite(each).all():
                raise self._not_finite(num_blocks, "infinite, or not a number")

    def _not_finite(self, num_blocks: int, reason: str) -> ValueError:
        assert self.packed is not None
        count = num_blocks * GRANULE
        end = self.layout.sink_tokens + self.packed.num_entries * GRANULE + count
        return ValueError(
            f"Some of the keys or values of the {count:,} tokens before token {end:,} are {reason}: no codes "
            "stand for such. Nothing was stored. Find out why the model computes them, or use a cache of full "
            "precision, such as DynamicHybridCache."
        )
