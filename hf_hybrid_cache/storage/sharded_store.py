"""Keys and values of one layer in shards, one for each of several processes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from ..processes import OutOfStepError, Peers
from .codec import CodecChoice
from .kv_shape import KVShape, Pair
from .layout import Layout, Shard
from .memory.growth import GRANULE
from .runs.run import HostBlocks
from .scratch import Scratch
from .store import Runs, Store
from .token_store import TokenStore

# Largest message of a process to the others.
_MESSAGE_BYTES = 16 * 2**20
# Tolerance of sums over new keys, relative to the sum of their magnitudes: processors round differently.
_SAME = 0.01
# Numbers that identify the tokens of a process.
MARK_SIZE = 4
_HALF_OF_COUNT = 2**20


class ShardedStore(Store):
    """
    A sequence whose blocks are distributed over the processes of a group.

    All processes store the same new tokens in the same order, and each keeps its own (see `Shard`). All processes must
    read all states, or rows, at the same time.

    Args:
        layout: with the shard of this process.
        runs: makes its runs, in host memory.
        peers: the processes of the group.
        is_compared: whether to compare new keys with those of other processes; one layer of a model is enough.
    """

    def __init__(
        self,
        shape: KVShape,
        layout: Layout,
        runs: Runs,
        scratch: Scratch,
        choice: CodecChoice | None,
        peers: Peers,
        is_compared: bool = False,
    ):
        super().__init__(shape, layout, runs, scratch, choice)
        self.peers = peers
        self._is_compared = is_compared
        self._likeness = (0.0, 0.0)

    @property
    def shard(self) -> Shard:
        """The blocks that this process keeps, which are all until a codec is chosen."""
        return self.layout.shard

    def write(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        self.settle_if_due()
        super().write(keys, values)  # there are no copies on a device
        if self._is_compared:
            total, magnitude = self._likeness
            numbers = keys[:, :, -1:].float()
            self._likeness = total + float(numbers.sum()), magnitude + float(numbers.abs().sum())

    def read(self) -> Pair:
        """Return all states, which all processes gather."""
        return self._of_all(super().read())

    def read_copy(self) -> Pair:
        """Return all states in memory that is not the store's, which all processes gather."""
        return self._of_all(super().read_copy())

    def take_from(self, other: TokenStore) -> None:
        """Store the states of another store of the same shard in this empty one."""
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

    def entries_together(self) -> dict[str, int]:
        """Return how many tokens and packed blocks all processes have, by their names in a file."""
        return {name: entries for name, (entries, _) in self.layout.parts(self.num_tokens).items()}

    def own_rows(self, name: str) -> list[bool]:
        """Return, for each row that a single process would have, whether this one keeps it."""
        _, runs = self.layout.parts(self.num_tokens)[name]
        return [self.shard.owns(block) for run in runs for block in run]

    def expect(self, entries: Mapping[str, int]) -> None:
        """
        Make own rows in this empty store, with any content, for so many entries in all parts.

        Raises:
            HostMemoryError: the host has no capacity for them; nothing has changed then.
        """
        full, quantized = entries.get("full", entries.get("states", 0)), entries.get("packed", 0)
        layout = replace(self.layout, quantized_blocks=quantized)
        num_tokens = full + quantized * GRANULE
        assert isinstance(self.dense, HostBlocks)
        self.dense.make_rows(layout.shard.tokens(num_tokens) - layout.own_quantized_blocks * GRANULE)
        if isinstance(self.packed, HostBlocks):
            self._fit_packed()
            self.packed.make_rows(layout.own_quantized_blocks)
        self.layout = layout
        self._set_length(num_tokens)

    def rows_together(self, name: str, role: int) -> Iterator[torch.Tensor]:
        """
        Yield the rows as a single process would have them, some at a time; all processes call this at once.

        Args:
            name: of the entries in a file.
            role: 0 for keys, 1 for values.
        """
        _, runs = self.layout.parts(self.num_tokens)[name]
        return self._gathered(self.rows(name)[role], runs)

    def _gathered(self, own: torch.Tensor, runs: Iterable[range]) -> Iterator[torch.Tensor]:
        """Yield the blocks of all processes, of the numbers in runs; `own` are those of this one, in order."""
        done, size = 0, self.shard.size
        at_once = _MESSAGE_BYTES // max(1, own.shape[1:].numel() * own.itemsize) // size
        for run in runs:
            rows = max(1, min(at_once, -(-len(run) // size)))
            for start in range(run.start, run.stop, rows * size):
                order = torch.arange(min(rows * size, run.stop - start))
                count = self.shard.blocks(start + len(order)) - self.shard.blocks(start)
                if self.shard.is_all:
                    yield own[done : done + count]
                else:
                    message = own.new_zeros((rows, *own.shape[1:]))
                    message[:count] = own[done : done + count]
                    received = self.peers.exchange(message.view(torch.uint8)).view(own.dtype)
                    # Consecutive blocks are of consecutive ranks.
                    yield received[(start + order) % size, order // size]
                done += count

    def _of_all(self, states: Pair) -> Pair:
        """Return the states of all processes, on the compute device; `states` are those of this one."""
        if not self.shard.is_all:
            states = self._read_together(states[0]), self._read_together(states[1])
        keys, values = (each.to(self.shape.device) for each in states)
        return keys, values

    def _read_together(self, own: torch.Tensor) -> torch.Tensor:
        """Return states `[batch, heads, tokens, head_dim]` of the whole sequence; `own` are those of this process."""
        batch, heads, _, head_dim = own.shape
        states, at = own.new_empty(batch, heads, self.num_tokens, head_dim), 0
        blocks = pad(own, (0, 0, 0, -own.shape[2] % GRANULE)).unflatten(2, (-1, GRANULE)).permute(2, 0, 1, 3, 4)
        for some in self._gathered(blocks, [range(-(-self.num_tokens // GRANULE))]):
            tokens = some.permute(1, 2, 0, 3, 4).flatten(2, 3)
            target = states[:, :, at : at + tokens.shape[2]]
            target.copy_(tokens[:, :, : target.shape[2]])
            at += tokens.shape[2]
        return states
