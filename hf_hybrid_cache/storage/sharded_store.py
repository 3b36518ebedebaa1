"""Keys and values of one layer in shards, one for each of several processes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..processes import OutOfStepError, Peers
from .kv_store import KVShape, Pair
from .layout import Layout
from .memory.growth import GRANULE
from .quantized_segment import QuantizedSegment
from .runs.host_blocks import HostBlocks
from .runs.run import Run
from .scratch import Scratch
from .shard import Shard
from .store import Store

if TYPE_CHECKING:
    from .shared_prefix import AnyStore

# Largest message of a process to the others.
_MESSAGE_BYTES = 16 * 2**20
# Tolerance of sums over new keys, relative to the sum of their magnitudes: processors round differently.
_SAME = 0.01
# Numbers that identify the tokens of a process.
MARK_SIZE = 4
_HALF_OF_COUNT = 2**20


class SharedPart(NamedTuple):
    """
    The rows of 64 tokens, or the packed blocks, of a shard.

    Attributes:
        segment: holds own rows.
        entries: tokens, or packed blocks, of the whole sequence.
        runs: numbers of the blocks of the whole sequence, in the order of rows.
    """

    segment: HostBlocks
    entries: int
    runs: tuple[range, ...]


class ShardedStore(Store):
    """
    A sequence whose blocks are distributed over the processes of a group.

    All processes store the same new tokens in the same order, and each keeps its own (see `Shard`). All processes must
    read all states, or rows, at the same time.

    Args:
        shape: of the states.
        layout: layout of the empty store, with the shard of this process.
        full: segment of tokens in full precision, in host memory.
        scratch: memory in which own states are put together.
        quantized: segment of quantized blocks.
        peers: the processes of the group.
        is_compared: whether to compare new keys with those of other processes; one layer of a model is enough.
    """

    def __init__(
        self,
        shape: KVShape,
        layout: Layout,
        full: Run,
        scratch: Scratch,
        quantized: QuantizedSegment | None,
        peers: Peers,
        is_compared: bool = False,
    ):
        super().__init__(shape, layout, full, scratch, quantized)
        self.peers = peers
        self._is_compared = is_compared
        self._likeness = (0.0, 0.0)

    @property
    def shard(self) -> Shard:
        """The blocks that this process keeps, which are all until a codec is chosen."""
        return self.layout.shard

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new states and return all, which all processes gather unless there are no others."""
        only_these = self.num_tokens == 0
        self.extend(keys, values)
        return (keys, values) if only_these else self.read()

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.settle()
        super().extend(keys, values)
        if self._is_compared:
            total, magnitude = self._likeness
            numbers = keys[:, :, -1:].float()
            self._likeness = total + float(numbers.sum()), magnitude + float(numbers.abs().sum())

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.extend(keys, values)

    def read(self) -> Pair:
        states = super().read()
        if not self.shard.is_all:
            states = self._read_together(states[0]), self._read_together(states[1])
        keys, values = (each.to(self.shape.device) for each in states)
        return keys, values

    def take_from(self, other: "AnyStore") -> None:
        assert isinstance(other, ShardedStore)
        super().take_from(other)
        self.layout, self._likeness = other.layout, other._likeness
        self._set_length(other.num_tokens)

    def mark(self) -> list[float]:
        """Return `MARK_SIZE` numbers that float32 has, by which processes compare their tokens."""
        return [*divmod(self.num_tokens, _HALF_OF_COUNT), *self._likeness]

    def require_same(self, marks: Sequence[Sequence[float]]) -> None:
        """
        Check that all processes have the same tokens.

        Args:
            marks: marks of all processes, in the order of ranks.

        Raises:
            OutOfStepError: another process has more, fewer or different tokens.
        """
        own, self._likeness = marks[self.peers.rank], (0.0, 0.0)
        for rank, mark in enumerate(marks):
            if mark == own:
                continue
            here, there = (f"rank {self.peers.rank_of_all(each)}" for each in (self.peers.rank, rank))
            if mark[:2] != own[:2]:
                count = int(mark[0]) * _HALF_OF_COUNT + int(mark[1])
                raise OutOfStepError(
                    f"A cache has {count:,} tokens at {there} and {self.num_tokens:,} at {here}: call the model in all "
                    "processes with the same inputs and options."
                )
            if abs(mark[2] - own[2]) > _SAME * own[3]:
                raise OutOfStepError(
                    f"{there.capitalize()} and {here} compute different tokens: call generate in all processes with "
                    "the same inputs and options; to sample, call transformers.set_seed in all with the same number."
                )

    def shared_parts(self) -> dict[str, SharedPart]:
        """Return own rows by their names in a file."""
        own, parts = self.parts(), {}
        for name, (entries, runs) in self.layout.parts(self.num_tokens).items():
            parts[name] = SharedPart(own[name].in_host_memory(), entries, runs)
        return parts

    def own_rows(self, part: SharedPart) -> list[bool]:
        """Return, for each row that a single process would have, whether this one keeps it."""
        return [self.shard.owns(block) for run in part.runs for block in run]

    def expect(self, entries: Mapping[str, int]) -> None:
        """
        Make own rows in this empty store, with any content, for so many entries in all parts.

        Raises:
            ValueError: the parts have other names, or no sequence has so many entries.
            HostMemoryError: the host has no capacity for them; nothing has changed then.
        """
        if entries.keys() != self.parts().keys():
            raise ValueError(f"there are {', '.join(entries)} instead of {', '.join(self.parts())}")
        full, quantized = entries.get("full", entries.get("states", 0)), entries.get("packed", 0)
        self.layout.require_entries(full, quantized)
        layout = replace(self.layout, quantized_blocks=quantized)
        num_tokens = full + quantized * GRANULE
        self.dense.make_rows(layout.shard.tokens(num_tokens) - layout.own_quantized_blocks * GRANULE)
        if self.quantized is not None:
            self.quantized.fit()
            self.quantized.packed.make_rows(layout.own_quantized_blocks)
        self.layout = layout
        self._set_length(num_tokens)

    def rows_together(self, part: SharedPart, role: int) -> Iterator[torch.Tensor]:
        """
        Yield the rows as a single process would have them, some at a time; all processes call this at once.

        Args:
            part: one of `shared_parts`.
            role: 0 for keys, 1 for values.
        """
        part.segment.wait_for_copies()
        part.segment.clear_rest()
        own = part.segment.rows()[role]
        at_once = _blocks_at_once(own.shape[1:].numel() * own.itemsize, self.shard.size)
        done = 0
        for run in part.runs:
            rows = min(at_once, -(-len(run) // self.shard.size))
            for start in range(run.start, run.stop, max(1, rows * self.shard.size)):
                blocks = torch.arange(start, min(start + rows * self.shard.size, run.stop))
                count = self.shard.blocks(int(blocks[-1]) + 1) - self.shard.blocks(start)
                if self.shard.is_all:
                    yield own[done : done + count]
                else:
                    message = own.new_zeros((rows, *own.shape[1:]))
                    message[:count] = own[done : done + count]
                    received = self.peers.exchange(message.view(torch.uint8)).view(own.dtype)
                    firsts = torch.tensor([Shard(rank, self.shard.size).blocks(start) for rank in range(len(received))])
                    ranks = blocks % self.shard.size
                    yield received[ranks, blocks // self.shard.size - firsts[ranks]]
                done += count

    def _read_together(self, own: torch.Tensor) -> torch.Tensor:
        """Return states `[batch, heads, tokens, head_dim]` of the whole sequence; `own` are those of this process."""
        batch, heads, _, head_dim = own.shape
        size = self.shard.size
        states = own.new_empty(batch, heads, self.num_tokens, head_dim)
        rows = max(1, -(-self.num_tokens // (GRANULE * size)))
        step = min(rows, _blocks_at_once(batch * heads * GRANULE * head_dim * own.itemsize, size)) * GRANULE
        for start in range(0, rows * GRANULE, step):
            piece = own[:, :, start : start + step]
            message = own.new_zeros(batch, heads, step, head_dim)
            message[:, :, : piece.shape[2]] = piece
            received = self.peers.exchange(message.view(torch.uint8)).view(own.dtype)
            # [size, batch, heads, blocks, 64, head_dim]; consecutive blocks are of consecutive ranks
            in_order = received.unflatten(3, (-1, GRANULE)).permute(1, 2, 3, 0, 4, 5).flatten(2, 4)
            target = states[:, :, start * size : start * size + in_order.shape[2]]
            target.copy_(in_order[:, :, : target.shape[2]])
        return states


def _blocks_at_once(block_bytes: int, size: int) -> int:
    """Return the number of blocks of each process in a message to all others."""
    return max(1, _MESSAGE_BYTES // max(1, block_bytes) // size)
