"""Keys and values of one layer, as tokens come and go: where new ones are written, and when blocks are packed."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from .kv_shape import Pair
from .layer_states import LayerStates, TokenStore, ranges
from .layout import Layout
from .memory.growth import GRANULE
from .memory.host_memory import HostMemoryError
from .pieces import in_one_run
from .runs.host_blocks import HostBlocks
from .runs.resident import Resident
from .runs.run import Run

# More new tokens than this are those of a chunk.
_FEW_TOKENS = GRANULE
_CHECKED_AT_ONCE = 64 * GRANULE


class RecentStates(NamedTuple):
    """
    The states in full precision after the quantized blocks of a layer, as they came.

    Attributes:
        start: number of tokens before them, which stay as they are while others follow.
        host_tokens: tokens of a split layer that are in host memory; `None` to let its layout decide.
        keys: `[batch, num_kv_heads, tokens, head_dim]`.
        values: likewise.
    """

    start: int
    host_tokens: int | None
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def states(self) -> Pair:
        return self.keys, self.values

    def of_sequences(self, indices: torch.Tensor) -> "RecentStates":
        """Return the states of some sequences, in that order."""
        keys, values = (each.index_select(0, indices.to(each.device)) for each in self.states)
        return self._replace(keys=keys, values=values)


class Store(LayerStates):
    """
    Keys and values of one layer, as tokens come and go.

    New tokens are written to the run of the newest ones. Whole blocks leave `ends` when there are too many, and blocks
    of `dense` are packed when they are due: at once if the codec is chosen, otherwise when `settle` chooses it. They
    are copied first, and the border moves last.
    """

    def add(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        """
        Store the states of new tokens, `[batch, num_kv_heads, new_tokens, head_dim]`.

        Args:
            keys: of any device and type.
            values: likewise.
            on_device: the device uses the tokens next: the copies of those in host memory are started.

        Raises:
            ValueError: there are no codes for some of the tokens; nothing has changed then.
            HostMemoryError: the host has no room for them; nothing has changed then.

        After any other error the tokens are those of before, or the new ones too, or `is_intact` is false.
        """
        if self.is_in_one_run:
            self._add(keys, values, on_device)
            return
        self._scratch.release()
        # Memory that may be refused is taken before anything changes, and lent again when it is used.
        room = self._room_for_staged(keys.shape[2]) if on_device else None
        self._add(keys, values, on_device)
        del room

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """
        Store new states like `add`, and return all, `[batch, num_kv_heads, num_tokens, head_dim]`, on the device.

        They are put together; the new ones are returned as they are if there are no others.
        """
        self.settle()
        if not self.num_tokens:
            self._add(keys, values, on_device=True)
            return keys, values
        if self.cpu_fraction is not None and self.streamed is not None:
            self.streamed.stream_from(0)
        new_tokens = keys.shape[2]
        if self.is_in_one_run:
            self._add(keys, values, on_device=True)
            return self.dense.read()
        if self.ends is not None and not self._make_room(new_tokens).host_tokens:
            self._add(keys, values, on_device=False)
            return self.ends.read()
        states = self._scratch.lend_states(self.shape, self.layout.shard.tokens(self.num_tokens + new_tokens))
        self._add(keys, values, on_device=True)
        return self._put_together(states)

    def add_first(self, keys: torch.Tensor, values: torch.Tensor) -> HostBlocks:
        """Store the first states like `add`, and return them as they came, to attend to."""
        assert not self.num_tokens
        dense = self.dense
        assert isinstance(dense, HostBlocks)
        self._scratch.release()
        self._add(keys, values, keeps_dense=True)
        return dense

    @property
    def is_in_host_blocks(self) -> bool:
        """Whether all tokens of the sequence are in blocks in host memory, packed or not, and none is streamed."""
        is_whole = self.ends is None and self.streamed is None and self.layout.shard.is_all
        return is_whole and isinstance(self.dense, HostBlocks)

    def make_place(self) -> int:
        """
        Have memory for the next token, and return how many may be written to the last block of `dense` one by one.

        A kernel writes them that attends to them, too. Then the block is full, or another is due to be packed. It is 0
        where something else is to be done first.
        """
        dense, held = self.dense, self.dense.num_entries
        until_border = self.layout.changes_at - 1 - self.num_tokens
        if until_border <= 0 or self.waits or not self.is_intact:
            return 0
        try:
            dense.reserve(held + 1)
        except HostMemoryError:  # whoever stores the token raises it
            return 0
        return min(until_border, dense.num_free, GRANULE - held % GRANULE)

    def note_written(self) -> None:
        """Count one more token of each sequence, which was written in its place, see `make_place`."""
        self.dense.num_entries += 1
        self._set_length(self.num_tokens + 1)

    def forget_uncounted(self) -> None:
        """Take a token back that `note_written` has counted in one place only, because it was interrupted."""
        if not self.is_intact:
            self.dense.truncate(self.dense.num_entries - 1)

    def observe(self, query: torch.Tensor) -> None:
        """Take note of queries that attend to these states, `[batch, query_heads, query_length, head_dim]`; settle."""
        if self._choice is not None:
            self._choice.observe(query, self.shape)
            self.settle()

    def observe_squares(self, squares: torch.Tensor) -> None:
        """Take note of the mean squares of one query of each sequence, while nothing is due, see `mean_squares`."""
        if self._choice is not None and not self._choice.is_made:
            self._choice.observe_squares(squares, 1)

    def settle(self, on_device: bool = False, keeps_dense: bool = False) -> None:
        """
        Pack the blocks that are due, if there are any; choose the codec first.

        Args:
            on_device: the device uses the blocks next.
            keeps_dense: leave the run of tokens in full precision as it is to who attends to it, and make another one.

        Raises:
            ValueError: there are no codes for some of them; nothing has changed then.
            HostMemoryError: the host has no room for them.
        """
        if self._choice is None or self.layout.with_due_blocks(self.num_tokens) is self.layout:
            return
        if not self._choice.is_made:
            self._choose()
            keeps_dense = True  # the queries that were seen may still attend to it
        self._pack(on_device, keeps_dense)

    def _pack(self, on_device: bool, keeps_dense: bool, new: Pair | None = None) -> None:
        """Pack the blocks that are due, with `new` tokens, of which only those that stay are written to `dense`."""
        dense, packed, held = self.dense, self.packed, self.dense.num_entries
        assert packed is not None
        new_tokens = 0 if new is None else new[0].shape[2]
        layout, before = self.layout.with_due_blocks(self.num_tokens + new_tokens), packed.num_entries
        first, count = self.sink_tokens, (layout.own_quantized_blocks - before) * GRANULE
        if not count:  # they are of other processes
            assert new is None
            self.layout = layout
            return
        packed.reserve(layout.own_quantized_blocks)
        dense.wait_for_copies()

        def read(start: int, end: int) -> Pair:
            if new is None or end <= held:
                return dense.read_range(start, end)
            keys, values = (states[:, :, max(0, start - held) : end - held] for states in new)
            if start >= held:
                return keys, values
            old_keys, old_values = (states.to(keys.device) for states in dense.read_range(start, held))
            return torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)

        codes = self._encoded(lambda start, end: read(first + start, first + end), count)
        kept, recent, renewed = min(first, held), read(first + count, held + new_tokens), None
        missing = read(kept, first)
        try:
            if keeps_dense or self._is_dense_on_device or held > layout.most_full_tokens:
                renewed = self._new_dense(read(0, first), recent)
            else:
                recent = recent[0].clone(), recent[1].clone()  # storing them may overwrite their source
            packed.write(*codes, on_device)
        except BaseException:
            packed.truncate(before)
            if renewed is not None:
                renewed.close()
            raise
        with self._changing():
            if renewed is None:
                dense.truncate(kept)
                dense.write(*missing)
                dense.write(*recent)
            else:
                self.dense, self._is_dense_on_device = renewed, False
                dense.close()
            self.layout = layout
            if new is not None:
                self._set_length(self.num_tokens + new_tokens)

    def recent_states(self) -> RecentStates:
        """Copy the states that later tokens would quantize; those of a split layer to host memory."""
        start = self.layout.settled_tokens(self.num_tokens)
        host_tokens = None if self.ends is None else self.layout.host_tokens
        return RecentStates(start, host_tokens, *self.copy_from(start, torch.device("cpu")))

    def extend_recent(self, recent: RecentStates) -> None:
        """Store recent states again after the tokens that were before them, where the layout had them."""
        if self.ends is None or recent.host_tokens is None:
            self.add(*recent.states)
            return
        self._scratch.release()
        in_host = recent.host_tokens - self.layout.host_tokens
        self.ends.reserve(self.ends.num_entries + recent.keys.shape[2] - in_host)
        with self._changing():
            self.dense.write(recent.keys[:, :, :in_host], recent.values[:, :, :in_host])
            self.ends.write(recent.keys[:, :, in_host:], recent.values[:, :, in_host:])
            self.layout = replace(self.layout, host_tokens=recent.host_tokens)
            self._set_length(self.num_tokens + recent.keys.shape[2])

    def run_for(self, part: str, num_entries: int) -> HostBlocks:
        """Return an empty run in host memory for entries of a part, to be filled: the own one, or a new one."""
        own = self.packed if part == "packed" else self.dense if self.ends is None else None
        return own if isinstance(own, HostBlocks) else HostBlocks.like(own or self.dense, num_entries)

    def take(self, runs: Mapping[str, Run]) -> None:
        """Store the entries of runs, by part, in this empty store; its own runs may be among them, already filled."""
        states, blocks = runs["states" if self.packed is None else "full"], 0
        if self.packed is not None:
            blocks = runs["packed"].num_entries
            self._fit_packed()
            if runs["packed"] is not self.packed:
                self.packed.extend_from(runs["packed"], 0, blocks)
        self.layout = self.layout.holding(states.num_entries, blocks)
        first, end = 0, states.num_entries
        if self.ends is not None:
            first = min(self.layout.first_tokens, states.num_entries)
            end = first + self.layout.host_tokens - blocks * GRANULE
            self.ends.extend_from(states, 0, first)
            self.ends.extend_from(states, end, states.num_entries)
        if states is not self.dense:
            self.dense.extend_from(states, first, end)
        self._set_length(states.num_entries + blocks * GRANULE)

    def take_from(self, other: TokenStore) -> None:
        """Store the states of another store of the same kind, for another device or type, in this empty one."""
        other.settle()
        self.take({part: in_one_run(other.pieces(part)) for part in self.entries()})

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`, which are at most as many as there are."""
        if self.ends is None or self.layout.cropped(num_tokens).host_tokens < self.layout.host_tokens:
            self.settle()
        self._truncate(num_tokens)

    def select(self, indices: torch.Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was."""
        self.settle()
        with self._changing():
            for run in self._all_runs:
                run.select(indices)
            self.shape = self.shape._replace(batch=len(indices))
            self.version += 1

    def _add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        on_device: bool = False,
        keeps_dense: bool = False,
    ) -> None:
        """Store new states; those that are due wait for the choice of the codec, which their queries are needed for."""
        before, new_tokens, on_host = self.num_tokens, keys.shape[2], not on_device or self.packed is not None
        layout = self.layout.after(before + new_tokens) if self.ends is None else self._make_room(new_tokens)
        waits = self.wants_queries
        if waits and layout is not self.layout and self.packed is not None:
            self.packed.reserve(layout.own_quantized_blocks)
            self._require_finite((keys, values), layout.own_quantized_blocks - self.packed.num_entries)
        was_staged, self.is_staged = self.is_staged, on_device
        streamed_before = 0 if self.streamed is None else self.streamed.num_entries
        is_packed_at_once = (
            new_tokens > _FEW_TOKENS
            and layout is not self.layout
            and not (self.wants_queries or keeps_dense)
            and self.ends is None
            and layout.shard.size == 1
            and (keys.dtype, values.dtype) == (self.shape.key_dtype, self.shape.value_dtype)
        )
        if self.packed is not None and not keys.is_cpu:
            self._let_dense_follow(on_device and new_tokens > _FEW_TOKENS and not is_packed_at_once)
        newest = self.dense if self.ends is None else self.ends
        newest_before, blocks_before = newest.num_entries, self.layout.quantized_blocks
        if not before and self.packed is not None and self.ends is None:
            newest.reserve(layout.most_full_tokens)
        try:
            if is_packed_at_once:
                self._pack(on_device, keeps_dense, (keys, values))
            elif self.ends is not None and layout.host_tokens != self.layout.host_tokens:
                self._write_through_ends(layout, keys, values, not on_host)
            else:
                if layout.shard.size > 1:
                    keys, values = layout.shard.part(keys, before), layout.shard.part(values, before)
                newest.write(keys, values, not on_host)
                self._set_length(before + new_tokens)
            if not (waits or is_packed_at_once) and layout is not self.layout:
                self.settle(on_device, keeps_dense)
            streamed = self.streamed  # another one, if a codec that was chosen has other sizes
            if (on_device or was_staged) and streamed is not None and streamed.num_entries == streamed_before:
                # It got no new entries, and learns where it is used next.
                streamed.write(*streamed.read_range(0, 0), on_device)
        except BaseException:
            if self.num_tokens == before and not self._is_changing:
                newest.truncate(newest_before)
            elif self.is_intact and self.layout.quantized_blocks == blocks_before:
                self._truncate(before)  # else the new tokens stay: what was packed cannot be as it was
            raise

    def _let_dense_follow(self, to_device: bool) -> None:
        """Let a chunk on an accelerator be packed there: its tokens go to host memory once they are packed."""
        dense = self.dense
        if to_device == self._is_dense_on_device or (to_device and isinstance(dense, Resident)):
            return
        dense.wait_for_copies()
        states = dense.read_range(0, dense.num_entries)
        followed = self._runs.on_device(self.shape) if to_device else self._new_dense()
        followed.write(states[0].to(followed.keys.device), states[1].to(followed.keys.device))
        self.dense, self._is_dense_on_device = followed, to_device
        dense.close()

    def _write_through_ends(self, layout: Layout, keys: torch.Tensor, values: torch.Tensor, on_device: bool) -> None:
        """Let new states go to the ends, and those that leave them go to the middle."""
        ends, dense, first = self.ends, self.dense, self.first_tokens
        assert ends is not None
        new_tokens, count = keys.shape[2], layout.host_tokens - self.layout.host_tokens
        missing = min(layout.first_tokens - first, new_tokens)
        removed = min(count, ends.num_entries - first)
        skipped, dense_before = count - removed, dense.num_entries
        leaving = keys[:, :, missing : missing + skipped], values[:, :, missing : missing + skipped]
        dense.reserve(dense_before + count)
        if removed:
            ends.leave_to_holders(ends.num_entries)
            # A copy, because its own copy to the host may still run when others take their places.
            old_keys, old_values = ends.read_range(first, first + removed)
            leaving = torch.cat([old_keys, leaving[0]], dim=2), torch.cat([old_values, leaving[1]], dim=2)
            del old_keys, old_values  # or `ends` would leave its memory to them
        ranges = ((0, missing), (missing + skipped, new_tokens)) if skipped else ((0, new_tokens),)
        try:
            dense.write(*leaving, on_device)
        except BaseException:
            dense.truncate(dense_before)  # these tokens are in the ends still, or new
            raise
        with self._changing():
            if removed:
                ends.remove(first, first + removed)
            for start, end in ranges:
                ends.write(keys[:, :, start:end], values[:, :, start:end])
            self.layout = replace(self.layout, host_tokens=layout.host_tokens)
            self._set_length(self.num_tokens + new_tokens)

    def _make_room(self, new_tokens: int) -> Layout:
        """
        Grow `ends` for the tokens that stay there. If memory is refused, fewer stay from now on.

        Returns:
            The layout with the new tokens.
        """
        assert self.ends is not None
        num_tokens = self.num_tokens + new_tokens
        while True:
            layout = self.layout.after(num_tokens)
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

    def _room_for_staged(self, new_tokens: int) -> Pair | None:
        """Lend memory in which streamed blocks will be dequantized; return `None` if none are."""
        if self.ends is None or self.packed is None or self.waits:
            return None
        start, end = self.staged_range()
        more = self.layout.after(self.num_tokens + new_tokens).host_tokens - self.middle_tokens
        return self._scratch.lend_states(self.shape, end - start + more)

    def _choose(self) -> None:
        """Choose the codec by all states that could be packed now, and drop the tokens of other shards."""
        choice, dense = self._choice, self.dense
        assert choice is not None
        dense.wait_for_copies()
        num_tokens = dense.num_entries
        first = min(self.sink_tokens, num_tokens)
        num_blocks = (num_tokens - first) // GRANULE
        for start, end in ranges(first, num_tokens, _CHECKED_AT_ONCE, first):
            self._require_finite(dense.read_range(start, end), num_blocks - 1)
        choice.make(lambda start, end: dense.read_range(first + start, first + end), num_tokens - first)
        self._fit_packed()
        if not self._own.is_all:
            own = [self._own.part(states, 0) for states in dense.read_range(0, num_tokens)]
            with self._changing():
                self.dense, self._is_dense_on_device = self._new_dense((own[0], own[1])), False
                self.layout = replace(self.layout, shard=self._own)

    def _fit_packed(self) -> None:
        """Replace the empty run of packed blocks by one for the codec, if their sizes differ."""
        assert self._choice is not None
        assert self.packed is not None
        shape = self._choice.packed_shape(self.shape)
        if shape != self.packed.shape:
            self.packed.close()
            self.packed = self._runs.packed(shape)
            self._note_streamed()

    def _new_dense(self, *states: Pair) -> Run:
        """Make a run of tokens in full precision with these."""
        dense = self._runs.dense(self.shape, self.layout)
        dense.reserve(self.layout.most_full_tokens)
        for pair in states:
            dense.write(*pair)
        return dense

    def _encoded(self, read: Callable[[int, int], Pair], count: int) -> Pair:
        """Quantize tokens that `read` gives, whole blocks; nothing is stored."""
        assert self._choice is not None
        try:
            return self._choice.encode(read, count)
        except ValueError as error:
            raise self._not_finite(count // GRANULE, str(error)) from None

    def _require_finite(self, states: Pair, num_blocks: int) -> None:
        for each in states:
            # A sum is quick, but may be infinite although all numbers are finite.
            if not torch.isfinite(each.sum()) and not torch.isfinite(each).all():
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

    def _truncate(self, num_tokens: int) -> None:
        layout = self.layout.cropped(num_tokens)
        if self.ends is None or layout.host_tokens < self.layout.host_tokens:
            self._truncate_middle(num_tokens if self.ends is None else layout.host_tokens, layout)
        with self._changing():
            if self.ends is not None:
                self.ends.truncate(num_tokens - layout.host_tokens)
            self.layout = layout
            self._set_length(num_tokens)

    def _truncate_middle(self, num_tokens: int, layout: Layout) -> None:
        """Keep the own part of the first tokens of the middle."""
        own, packed = layout.shard.tokens(num_tokens), self.packed
        if packed is None:
            self.dense.truncate(own)
            return
        first, kept = min(own, self.sink_tokens), layout.own_quantized_blocks
        if kept == packed.num_entries:
            self.dense.truncate(own - kept * GRANULE)
            return
        self.wait_for_copies()
        keys, values = self._dequantized(kept, kept + 1)
        left = own - first - kept * GRANULE
        with self._changing():
            self.dense.truncate(first)
            self.dense.write(keys[:, :, :left], values[:, :, :left])
            packed.truncate(kept)
