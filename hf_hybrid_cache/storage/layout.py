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
    Borders between the tokens of one layer. Only they are kept, so most new tokens change nothing.

    Example, sink_tokens=64, is_quantized=True, device_tokens=192, 500 tokens:
        device [0..63]   host, quantized [64..319]   host, recent [320..383]   device [384..499]

    Attributes:
        sink_tokens: first tokens that are never quantized, whole blocks; on the device if a block more fits there.
        is_quantized: a block is quantized once 64 tokens have come after it in the same place.
        device_tokens: most tokens on the device if the middle is in host memory; 0 if all tokens are in one place.
        shard: the tokens of this process.
        quantized_blocks: quantized blocks after the sinks, of all processes.
        host_tokens: tokens in host memory, after the first ones on the device; whole blocks until tokens are removed.
    """

    sink_tokens: int = GRANULE
    is_quantized: bool = False
    device_tokens: int = 0
    shard: Shard = Shard.ALL
    quantized_blocks: int = 0
    host_tokens: int = 0

    def after(self, num_tokens: int) -> "Layout":
        """Return the layout for `num_tokens`: itself, unless a block is quantized or tokens leave the device."""
        if num_tokens < self.changes_at:
            return self
        if not self.device_tokens:
            return self.with_due_blocks(num_tokens)
        too_many = num_tokens - self.host_tokens - self.device_tokens
        leaving = -(-too_many // self._leaving_at_once) * self._leaving_at_once
        return replace(self, host_tokens=self.host_tokens + leaving).with_due_blocks(num_tokens)

    def with_due_blocks(self, num_tokens: int) -> "Layout":
        """Return the layout in which all blocks are quantized that are due after `num_tokens`."""
        if not self.is_quantized:
            return self
        due = (self._middle_end(num_tokens) - self.sink_tokens - _RECENT_TOKENS) // GRANULE
        return replace(self, quantized_blocks=due) if due > self.quantized_blocks else self

    @property
    def quantized_end(self) -> int:
        """The first token after sinks and quantized blocks, whether there are as many tokens or not."""
        return self.sink_tokens + self.quantized_blocks * GRANULE

    def growing(self, lengths: Iterable[int]) -> "list[Layout]":
        """Return the layouts after growing to each of `lengths` in turn."""
        return list(accumulate(lengths, Layout.after, initial=self))[1:]

    def holding(self, full_tokens: int, quantized_blocks: int) -> "Layout":
        """Return the layout of a layer that holds so many tokens in full precision and quantized blocks."""
        host_tokens = self.after(full_tokens).host_tokens
        if self.device_tokens and quantized_blocks:
            # Recent tokens follow the quantized blocks, as they did when these were quantized.
            recent = self.sink_tokens - self.first_tokens + _RECENT_TOKENS
            host_tokens = max(host_tokens, min(recent, full_tokens - self.first_tokens)) + quantized_blocks * GRANULE
        return replace(self, host_tokens=host_tokens, quantized_blocks=quantized_blocks)

    def require_entries(self, full_tokens: int, quantized_blocks: int) -> None:
        """Raise a `ValueError` if blocks would be quantized before the sinks are complete: kernels read all sinks."""
        if quantized_blocks and full_tokens < self.sink_tokens:
            raise ValueError(
                f"there are {quantized_blocks:,} quantized blocks after {full_tokens:,} tokens in full precision, of "
                f"which the first {self.sink_tokens:,} are never quantized"
            )

    def cropped(self, num_tokens: int) -> "Layout":
        """Return the layout of the first `num_tokens`; a block that loses tokens is not quantized any more."""
        host_tokens = min(self.host_tokens, max(0, num_tokens - self.first_tokens))
        quantized_blocks = min(self.quantized_blocks, max(0, num_tokens - self.sink_tokens) // GRANULE)
        return replace(self, host_tokens=host_tokens, quantized_blocks=quantized_blocks)

    @cached_property
    def first_tokens(self) -> int:
        """Number of tokens on the device that come before those in host memory, once there are as many."""
        return self.sink_tokens if self.device_tokens >= self.sink_tokens + GRANULE else 0

    def settled_tokens(self, num_tokens: int) -> int:
        """Return how many of the first tokens, in whole blocks, stay as they are while others follow."""
        end = min(self._middle_end(num_tokens), num_tokens)
        if self.is_quantized:
            return self.quantized_end if end >= self.sink_tokens else 0
        return end // GRANULE * GRANULE

    @property
    def most_full_tokens(self) -> int:
        """Largest number of tokens beside quantized blocks that are in full precision at once."""
        return self.sink_tokens - self.first_tokens + _RECENT_TOKENS + GRANULE

    def parts(self, num_tokens: int) -> dict[str, tuple[int, tuple[range, ...]]]:
        """Return the entries of all processes and the numbers of their blocks in order, by names of parts in a file."""
        blocks, quantized = -(-num_tokens // GRANULE), self.quantized_blocks
        if not self.is_quantized:
            return {"states": (num_tokens, (range(blocks),))}
        first = min(self.sink_tokens // GRANULE, blocks)
        last = first + quantized
        full = num_tokens - quantized * GRANULE, (range(first), range(last, blocks))
        return {"full": full, "packed": (quantized, (range(first, last),))}

    @property
    def after_prefix(self) -> "Layout":
        """The layout of the tails of a prefix, if this one is empty; the prefix holds its first tokens."""
        return replace(self, sink_tokens=0, device_tokens=self.device_tokens - self.first_tokens)

    @cached_property
    def own_sink_tokens(self) -> int:
        """Number of sink tokens that this process keeps beside quantized blocks."""
        return self.shard.tokens(self.sink_tokens - self.first_tokens)

    @cached_property
    def own_quantized_blocks(self) -> int:
        """Number of quantized blocks that this process keeps."""
        first = self.sink_tokens // GRANULE
        return self.shard.blocks(first + self.quantized_blocks) - self.shard.blocks(first)

    @cached_property
    def changes_at(self) -> int:
        """The least number of tokens that moves a border."""
        if self.device_tokens:
            return self.host_tokens + self.device_tokens + 1
        return self.most_full_tokens + self.quantized_blocks * GRANULE if self.is_quantized else sys.maxsize

    def _middle_end(self, num_tokens: int) -> int:
        """Return the end of the tokens that may be quantized, which are in host memory if some are on the device."""
        return self.first_tokens + self.host_tokens if self.device_tokens else num_tokens

    @cached_property
    def _leaving_at_once(self) -> int:
        blocks = int((self.device_tokens - self.first_tokens) * _LEAVING_AT_ONCE) // GRANULE
        return max(1, blocks) * GRANULE
