"""Keys and values of one layer in its runs, and how they are read."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from .codec import CodecChoice, KVCodec
from .cpu_fraction import CpuFraction
from .kv_shape import KVShape, Pair
from .layout import Layout, Shard
from .memory.growth import GRANULE
from .pieces import Piece, rows_of
from .runs.resident import Resident
from .runs.run import Run
from .runs.streamed import Streamed
from .runs.token_buffer import TokenBuffer
from .scratch import Scratch
from .stats import CacheStats


class Runs(Protocol):
    """Interface of what makes the runs of a layer, where its placement says."""

    def dense(self, shape: KVShape, layout: Layout) -> Run:
        """Make an empty run of tokens in full precision."""

    def packed(self, shape: KVShape) -> Run:
        """Make an empty run of packed blocks of this shape."""

    def on_device(self, shape: KVShape) -> Resident:
        """Make an empty run of a chunk in full precision on the compute device."""


class TokenStore(ABC):
    """
    Tokens of a layer, which change as a whole or not at all: the base of all stores.

    Attributes:
        shape: of the states.
        num_tokens: tokens of the sequence, of which a shard may hold some.
        version: counts changes of the tokens, not of their form.
    """

    shape: KVShape
    num_tokens = 0
    version = 0
    _is_changing = False

    @abstractmethod
    def settle(self) -> None:
        """Pack the blocks that are due."""

    @abstractmethod
    def pieces(self, part: str) -> list[Piece]:
        """Return the entries of a part in order; they are the same for stores of the same states and codes."""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the store as not whole if the change inside ends half-way."""
        self._is_changing = True
        yield
        self._is_changing = False

    def _set_length(self, num_tokens: int) -> None:
        self.version += 1  # first: after an interruption here, earlier handles are stale
        self.num_tokens = num_tokens


class LayerStates(TokenStore):
    """
    Keys and values of one layer, in one to three runs.

    In the order of tokens, where any but `dense` may be missing:
        ends [first tokens]   dense [sinks]   packed   dense [recent tokens]   ends [newest tokens]
    The tokens of `dense` and `packed` are the middle.

    Args:
        shape: of the states.
        layout: layout of the empty store.
        runs: makes its runs.
        scratch: memory in which all states are put together for attention on the device.
        choice: the codec of a quantized layer, given or still to be chosen.
        ends: run of both ends, if the others are elsewhere.
        cpu_fraction: fraction of the middle that the CPU attends to, if the rest is streamed.
        stats: records if fewer tokens are on the device than there should be.

    Attributes:
        layout: borders between the tokens.
        dense: tokens in full precision.
        packed: packed blocks; `None` if the layer is not quantized.
        is_in_one_run: all tokens are in one run, so that nothing is put together.
        streamed: the run that grows with the sequence, if it is streamed to the device.
        is_staged: the last tokens were stored for a use on the device.
        blocks: the record of the tokens in host memory that kernels read; attention makes it and keeps it true.
    """

    blocks: Any = None

    def __init__(
        self,
        shape: KVShape,
        layout: Layout,
        runs: Runs,
        scratch: Scratch,
        choice: CodecChoice | None = None,
        ends: Resident | None = None,
        cpu_fraction: CpuFraction | None = None,
        stats: CacheStats | None = None,
    ):
        self.shape = shape
        self._runs, self._choice, self._scratch, self._stats = runs, choice, scratch, stats
        # Until the codec is chosen every process keeps all tokens, so that all choose by the same states.
        self._own = layout.shard
        self.layout = layout if choice is None or choice.is_made else replace(layout, shard=Shard.ALL)
        self.dense, self.ends, self.cpu_fraction = runs.dense(shape, layout), ends, cpu_fraction
        self.packed = None if choice is None else runs.packed(choice.packed_shape(shape))
        self._is_dense_on_device = False  # while a chunk is packed there, of a layer that keeps no tokens there
        self.is_in_one_run = self.packed is None and ends is None
        self._note_streamed()
        self.is_staged = ends is None and self.streamed is not None

    @property
    def is_intact(self) -> bool:
        """Whether the store is whole; it is not after a change that ended half-way."""
        dense, packed, ends, layout = self.dense, self.packed, self.ends, self.layout
        if self._is_changing or not dense.is_intact:
            return False
        held, middle = dense.num_entries, self.num_tokens
        if ends is not None:
            middle = layout.host_tokens
            if not ends.is_intact or ends.num_entries + middle != self.num_tokens:
                return False
        if packed is not None:
            if not packed.is_intact or packed.num_entries != layout.own_quantized_blocks:
                return False
            held += packed.num_entries * GRANULE
        return held == (middle if layout.shard.size == 1 else layout.shard.tokens(middle))

    @property
    def codec(self) -> KVCodec | None:
        """The codec, asked for or chosen; `None` if the layer is not quantized."""
        return None if self._choice is None else self._choice.codec

    @property
    def wants_queries(self) -> bool:
        """Whether the store needs queries to choose its codec."""
        return self._choice is not None and not self._choice.is_made

    @property
    def waits(self) -> bool:
        """Whether tokens that are due wait for the choice of the codec."""
        return self.wants_queries and self.layout.with_due_blocks(self.num_tokens) is not self.layout

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tokens in full precision that wait for the choice of the codec."""
        return self.dense.num_entries * self.dense.bytes_per_token if self.waits else 0

    @property
    def middle_tokens(self) -> int:
        """Number of own tokens that are not in `ends`."""
        return self.dense.num_entries + (0 if self.packed is None else self.packed.num_entries * GRANULE)

    @property
    def first_tokens(self) -> int:
        """Number of tokens in `ends` that come before all others."""
        return 0 if self.ends is None else min(self.layout.first_tokens, self.ends.num_entries)

    @property
    def sink_tokens(self) -> int:
        """Number of tokens in `dense` that come before packed blocks, once there are as many."""
        return self.layout.own_sink_tokens

    @property
    def num_shareable(self) -> int:
        """Number of first tokens, in whole blocks, that later tokens do not change once the store is settled."""
        return self.layout.with_due_blocks(self.num_tokens).settled_tokens(self.num_tokens)

    def staged_range(self) -> tuple[int, int]:
        """Return the range of tokens in the middle that the device uses now, counted from the first of them."""
        streamed = self.streamed
        if self.cpu_fraction is None or streamed is None:
            return 0, self.middle_tokens
        start, end = streamed.streamed_from, streamed.num_entries
        if self.packed is None:
            return start, end
        return self.sink_tokens + start * GRANULE, self.sink_tokens + end * GRANULE

    def read_staged(self) -> Pair:
        """Return the states of `staged_range`, on the device; call it once for each `add` for a use there."""
        streamed, choice = self.streamed, self._choice
        if self.cpu_fraction is None or streamed is None:
            return self.read_middle()
        start, end = self.staged_range()
        states = streamed.read_staged()
        if choice is not None:
            packed, states = states, self._scratch.lend_states(self.shape, end - start)
            choice.decode(packed, states)
        # Each use prepares the next one.
        streamed.stream_from(self.cpu_fraction.blocks(streamed.num_blocks))
        return states

    def note_ended(self, cpu_was_last: bool) -> None:
        """Note whether the CPU was the last to end, if the CPU fraction adapts."""
        assert self.cpu_fraction is not None
        self.cpu_fraction.note(cpu_was_last, self.num_tokens)

    def read(self) -> Pair:
        """Return all keys and values, on the compute device."""
        if self.is_in_one_run:
            return self.dense.read()
        if self.ends is not None and not self.middle_tokens:
            return self.ends.read()
        in_ends = 0 if self.ends is None else self.ends.num_entries
        return self._put_together(self._scratch.lend_states(self.shape, in_ends + self.middle_tokens))

    def read_copy(self) -> Pair:
        """Return all keys and values, contiguous, in memory that is not the store's."""
        if self.packed is not None and self.ends is None and self.layout.shard.is_all:
            return self._put_together(Scratch(self.shape.device).lend_states(self.shape, self.middle_tokens))
        keys, values = (each.clone(memory_format=torch.contiguous_format) for each in self.read())
        return keys, values

    def read_middle(self) -> Pair:
        """Return the states that are not in `ends`, on the compute device."""
        if self.packed is None:
            return self.dense.read()
        states = self._scratch.lend_states(self.shape, self.middle_tokens)
        self._put_middle_together(states)
        return states

    def middle_in_pieces(self, size: int, cut: int) -> Iterator[tuple[int, Pair]]:
        """
        Yield the states of the middle in pieces, on their own device, with the first token of each.

        Args:
            size: tokens of a piece, at most, whole blocks.
            cut: token in a block, with which a piece begins.
        """
        self.wait_for_copies()
        first, last = self._packed_range
        if first:
            yield 0, self.dense.read_range(0, first)
        for start, end in ranges(first, last, size, cut):
            yield start, self._dequantized((start - first) // GRANULE, (end - first) // GRANULE)
        skipped, num_tokens = last - first, self.middle_tokens
        rest = (size, cut) if self.packed is None else (num_tokens, 0)
        for start, end in ranges(last, num_tokens, *rest):
            yield start, self.dense.read_range(start - skipped, end - skipped)

    def copy_from(self, start: int, device: torch.device | None = None) -> Pair:
        """Copy the states from token `start`, which is not packed; those of a split layer to one device."""
        self.wait_for_copies()
        first, last = self._packed_range
        middle_start = max(0, start - self.first_tokens - (last - first))
        keys, values = self.dense.read_range(middle_start, self.dense.num_entries)
        if self.ends is None:
            return keys.clone(), values.clone()
        device = device or self.shape.device
        in_ends = self.ends.read_range(min(start, self.first_tokens), self.ends.num_entries)
        keys, values = (
            torch.cat([old.to(device), new.to(device)], dim=2) for old, new in zip((keys, values), in_ends, strict=True)
        )
        return keys, values

    def entries(self) -> dict[str, int]:
        """Return how many entries there are of each part of the layer, by its name in a file."""
        tokens = self.dense.num_entries + (0 if self.ends is None else self.ends.num_entries)
        return {"states": tokens} if self.packed is None else {"full": tokens, "packed": self.packed.num_entries}

    def pieces(self, part: str) -> list[Piece]:
        if part == "packed" and self.packed is not None:
            return [Piece(self.packed, 0, self.packed.num_entries)]
        dense = Piece(self.dense, 0, self.dense.num_entries)
        if self.ends is None:
            return [dense]
        first = self.first_tokens
        return [Piece(self.ends, 0, first), dense, Piece(self.ends, first, self.ends.num_entries)]

    def rows(self, part: str, start: int = 0) -> Pair:
        """Return rows of a part as a file has them, from entry `start` on, the first of a row; a copy where needed."""
        return rows_of(self.pieces(part), start)

    def buffers(self) -> Iterable[TokenBuffer]:
        """Return all buffers that hold memory for this layer alone."""
        return [buffer for run in self._all_runs for buffer in run.buffers()]

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        """Return the device and bytes of each buffer after this empty store had grown to each of `lengths`."""
        layouts = self.layout.growing(lengths)
        middle = lengths
        if self.ends is not None:
            middle = [each.host_tokens for each in layouts]
            yield from self.ends.planned_bytes([n - there for n, there in zip(lengths, middle, strict=True)])
        if self.packed is None:
            yield from self.dense.planned_bytes([self.layout.shard.tokens(n) for n in middle])
        else:
            yield from self.dense.planned_bytes([self.layout.most_full_tokens])
            yield from self.packed.planned_bytes([each.own_quantized_blocks for each in layouts])

    def wait_for_copies(self) -> None:
        """Block the calling thread until no copy reads or writes the stored states, and all of them are there."""
        for run in self._all_runs:
            run.wait_for_copies()

    def wait_until_stored(self) -> None:
        """Block the calling thread until all stored states are there; copies may still read them."""
        for run in (self.dense, self.packed, self.ends):
            if run is not None:
                run.wait_until_stored()

    def close(self) -> None:
        """Give back memory that is shared with other layers. The store must not be used afterwards."""
        self.version += 1
        for run in self._all_runs:
            run.close()
        self._scratch.release()

    def _note_streamed(self) -> None:
        growing = self.dense if self.packed is None else self.packed
        self.streamed = growing if isinstance(growing, Streamed) else None

    @property
    def _all_runs(self) -> list[Run]:
        return [run for run in (self.ends, self.dense, self.packed) if run is not None]

    @property
    def _packed_range(self) -> tuple[int, int]:
        """The first token of the middle that is packed, and the one after the last."""
        if self.packed is None:
            return 0, 0
        first = min(self.dense.num_entries, self.sink_tokens)
        return first, first + self.packed.num_entries * GRANULE

    def _put_together(self, states: Pair) -> Pair:
        """Write all own states into `states`, which were lent on the compute device, and return them."""
        ends, first = self.ends, self.first_tokens
        last = first + states[0].shape[2] - (0 if ends is None else ends.num_entries)
        self._put_middle_together((states[0][:, :, first:last], states[1][:, :, first:last]))
        if ends is not None:
            _put_around(ends.read(), states, first, last)
        return states

    def _put_middle_together(self, states: Pair) -> None:
        """Write the states of the middle into `states`."""
        packed, (first, last) = self.packed, self._packed_range
        if packed is not None and first < last:
            assert self._choice is not None
            self._choice.decode(packed.read(), (states[0][:, :, first:last], states[1][:, :, first:last]))
        _put_around(self.dense.read(), states, first, last)

    def _dequantized(self, first: int, last: int) -> Pair:
        """Dequantize the tokens of some packed blocks, on their device; copies must be done."""
        assert self.packed is not None
        assert self._choice is not None
        packed, shape = self.packed.read_range(first, last), self.shape
        heads, device, tokens = (shape.batch, shape.num_kv_heads), packed[0].device, (last - first) * GRANULE
        keys = torch.empty(*heads, tokens, shape.key_dim, dtype=shape.key_dtype, device=device)
        values = torch.empty(*heads, tokens, shape.value_dim, dtype=shape.value_dtype, device=device)
        self._choice.decode(packed, (keys, values))
        return keys, values


def _put_around(states: Pair, targets: Pair, first: int, last: int) -> None:
    """Write states around those from `first` to `last`."""
    for target, source in zip(targets, states, strict=True):
        target[:, :, :first] = source[:, :, :first]
        target[:, :, last:] = source[:, :, first:]


def ranges(start: int, end: int, size: int, cut: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of `size`, whole blocks, from `start` to `end`; one ends where the block with `cut` begins."""
    cut = start + max(0, cut - start) // GRANULE * GRANULE
    while start < end:
        stop = min(start + size, end)
        if start < cut < stop:
            stop = cut
        yield start, stop
        start = stop
