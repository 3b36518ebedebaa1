"""Layout of a layer's tokens: on the device or in host memory, quantized or not, in this process or another."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

import torch

from .memory.growth import GRANULE

# Least number of recent tokens in full precision: assisted decoding may take them back.
_RECENT_TOKENS = GRANULE
# Fraction of the tokens on the device that leave it at once, so that the others are seldom moved.
_LEAVING_AT_ONCE = 1 / 8


@dataclass(frozen=True)
class Shard:
    """
    Every `size`-th block of 64 tokens: block `b` is kept by rank `b % size`.

    So a new block goes to a process that has the fewest, also after tokens were removed, and each process knows which
    blocks the others keep.

    Attributes:
        rank: rank of the process.
        size: number of processes.
    """

    rank: int
    size: int

    ALL: ClassVar["Shard"]

    @property
    def is_all(self) -> bool:
        """Whether this process keeps all blocks."""
        return self.size == 1

    def owns(self, blocks: Any) -> Any:
        """Return whether this process keeps the block of a number, or each block of a tensor of numbers."""
        return blocks % self.size == self.rank

    def blocks(self, num_blocks: int) -> int:
        """Return the number of own blocks among the first `num_blocks`."""
        return max(0, (num_blocks - self.rank + self.size - 1) // self.size)

    def tokens(self, num_tokens: int) -> int:
        """Return the number of own tokens among the first `num_tokens`."""
        block, rest = divmod(num_tokens, GRANULE)
        return self.blocks(block) * GRANULE + (rest if self.owns(block) else 0)

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Return the positions of own tokens from `start` to `end`, int64."""
        tokens = torch.arange(start, end)
        return tokens[self.owns(tokens // GRANULE)]

    def part(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """Return own tokens of states `[batch, heads, tokens, head_dim]` that begin at token `start` of a sequence."""
        count = states.shape[2]
        if self.is_all:
            return states
        if start // GRANULE == (start + count - 1) // GRANULE:  # a decode step: few operations
            return states if self.owns(start // GRANULE) else states[:, :, :0]
        return states.index_select(2, (self.positions(start, start + count) - start).to(states.device))


Shard.ALL = Shard(0, 1)


@dataclass(frozen=True)
class Layout:
    """
    Borders between the tokens of a layer in one place. Only they are kept, so most new tokens change nothing.

    Example, sink_tokens=64, is_quantized=True, 300 tokens:
        sinks [0..63]   quantized [64..191]   recent [192..299]

    Attributes:
        sink_tokens: first tokens of the sequence that are never quantized, whole blocks.
        is_quantized: a block is quantized once 64 tokens have come after it.
        first_tokens: sink tokens that are elsewhere; positions here are counted after them.
        shard: the tokens of this process.
        quantized_blocks: quantized blocks after the sinks, of all processes.
        choosing_blocks: the due blocks with which a codec is chosen though nobody asks for it.
    """

    sink_tokens: int = GRANULE
    is_quantized: bool = False
    first_tokens: int = 0
    shard: Shard = Shard.ALL
    quantized_blocks: int = 0
    choosing_blocks: int = 1

    def after(self, num_tokens: int) -> "Layout":
        """Return the layout for `num_tokens`: itself, unless a block is due to be quantized."""
        if num_tokens < self.changes_at:
            return self
        due = (num_tokens - self._sinks_here - _RECENT_TOKENS) // GRANULE
        return replace(self, quantized_blocks=due)

    def growing(self, lengths: Iterable[int]) -> "list[Layout]":
        """Return the layouts after growing to each of `lengths` in turn."""
        return list(accumulate(lengths, Layout.after, initial=self))[1:]

    def require_entries(self, full_tokens: int, quantized_blocks: int) -> None:
        """Raise a `ValueError` if blocks would be quantized before the sinks are complete: kernels read all sinks."""
        if quantized_blocks and full_tokens < self.sink_tokens:
            raise ValueError(
                f"there are {quantized_blocks:,} quantized blocks after {full_tokens:,} tokens in full precision, of "
                f"which the first {self.sink_tokens:,} are never quantized"
            )

    def cropped(self, num_tokens: int) -> "Layout":
        """Return the layout of the first `num_tokens`; a block that loses tokens is not quantized any more."""
        quantized_blocks = min(self.quantized_blocks, max(0, num_tokens - self._sinks_here) // GRANULE)
        return self if quantized_blocks == self.quantized_blocks else replace(self, quantized_blocks=quantized_blocks)

    def settled_tokens(self, num_tokens: int) -> int:
        """Return how many of the first tokens, in whole blocks, stay as they are while others follow."""
        if not self.is_quantized:
            return num_tokens // GRANULE * GRANULE
        return self._sinks_here + self.quantized_blocks * GRANULE if num_tokens >= self._sinks_here else 0

    @cached_property
    def most_full_tokens(self) -> int:
        """Largest number of tokens beside quantized blocks that are in full precision at once."""
        return self._sinks_here + _RECENT_TOKENS + GRANULE

    def parts(self, num_tokens: int) -> dict[str, tuple[int, tuple[range, ...]]]:
        """Return the entries of all processes and the numbers of their blocks in order, by names of parts in a file."""
        blocks, quantized = -(-num_tokens // GRANULE), self.quantized_blocks
        if not self.is_quantized:
            return {"states": (num_tokens, (range(blocks),))}
        first = min(self.sink_tokens // GRANULE, blocks)
        last = first + quantized
        full = num_tokens - quantized * GRANULE, (range(first), range(last, blocks))
        return {"full": full, "packed": (quantized, (range(first, last),))}

    @cached_property
    def own_sink_tokens(self) -> int:
        """Number of sink tokens that this process keeps beside quantized blocks."""
        return self.shard.tokens(self._sinks_here)

    @cached_property
    def own_quantized_blocks(self) -> int:
        """Number of quantized blocks that this process keeps."""
        first = self.sink_tokens // GRANULE
        return self.shard.blocks(first + self.quantized_blocks) - self.shard.blocks(first)

    @cached_property
    def changes_at(self) -> int:
        """The least number of tokens that moves a border."""
        return self.most_full_tokens + self.quantized_blocks * GRANULE if self.is_quantized else sys.maxsize

    @cached_property
    def _sinks_here(self) -> int:
        return self.sink_tokens - self.first_tokens


@dataclass(frozen=True)
class Split:
    """
    Borders of a layer whose first and newest tokens are on the device, and the middle in host memory.

    Example, sink_tokens=64, device_tokens=192, 500 tokens:
        device [0..63]   host [64..383]   device [384..499]

    Attributes:
        device_tokens: most tokens on the device.
        sink_tokens: first tokens of the sequence, which are on the device if a block more fits there.
    """

    device_tokens: int
    sink_tokens: int

    @cached_property
    def first_tokens(self) -> int:
        """Number of tokens on the device that come before those in host memory, once there are as many."""
        return self.sink_tokens if self.device_tokens >= self.sink_tokens + GRANULE else 0

    def host_tokens(self, num_tokens: int, before: int = 0) -> int:
        """Return how many of `num_tokens` are in host memory, where `before` were; whole blocks leave the device."""
        too_many = num_tokens - before - self.device_tokens
        return before if too_many <= 0 else before - (-too_many // self._leaving_at_once) * self._leaving_at_once

    def growing(self, lengths: Iterable[int], before: int = 0) -> list[int]:
        """Return the tokens in host memory after growing to each of `lengths` in turn, where `before` were at first."""
        return list(accumulate(lengths, lambda there, length: self.host_tokens(length, there), initial=before))[1:]

    @cached_property
    def _leaving_at_once(self) -> int:
        blocks = int((self.device_tokens - self.first_tokens) * _LEAVING_AT_ONCE) // GRANULE
        return max(1, blocks) * GRANULE
