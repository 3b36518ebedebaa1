"""Layout of a layer's tokens: on the device or in host memory, quantized or not, in this process or another."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from .memory.growth import GRANULE
from .shard import Shard

# Least number of recent tokens in full precision: assisted decoding may take them back.
RECENT_TOKENS = GRANULE
# Fraction of the tokens on the device that leave it at once, so that the others are seldom moved.
_LEAVING_AT_ONCE = 1 / 8


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
        if num_tokens < self._changes_at:
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
        end = self.first_tokens + self.host_tokens if self.device_tokens else num_tokens
        due = (end - self.sink_tokens - RECENT_TOKENS) // GRANULE
        return replace(self, quantized_blocks=due) if due > self.quantized_blocks else self

    @property
    def quantized_end(self) -> int:
        """The first token after sinks and quantized blocks, whether there are as many tokens or not."""
        return self.sink_tokens + self.quantized_blocks * GRANULE

    def quantized_ends(self, start: int, end: int) -> list[int]:
        """Return the `quantized_end` after each of the tokens `start` to `end`, if they come one by one."""
        layout, ends = self, list[int]()
        while start + len(ends) < end:
            layout = layout.after(start + len(ends) + 1)
            ends += [layout.quantized_end] * (min(end, layout._changes_at - 1) - start - len(ends))
        return ends

    def growing(self, lengths: Iterable[int]) -> "list[Layout]":
        """Return the layouts after growing to each of `lengths` in turn."""
        return list(accumulate(lengths, Layout.after, initial=self))[1:]

    def holding(self, full_tokens: int, quantized_blocks: int) -> "Layout":
        """Return the layout of a layer that holds so many tokens in full precision and quantized blocks."""
        host_tokens = self.after(full_tokens).host_tokens
        if self.device_tokens and quantized_blocks:
            # Recent tokens follow the quantized blocks, as they did when these were quantized.
            recent = self.middle.sink_tokens + RECENT_TOKENS
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

    def indexed_blocks(self, num_tokens: int) -> range:
        """Return the numbers of the indexed blocks of tokens in one place: all but the first and last ones."""
        first = self.sink_tokens // GRANULE if self.is_quantized else 1
        count = self.quantized_blocks if self.is_quantized else max(0, (num_tokens - RECENT_TOKENS) // GRANULE - 1)
        return range(first, first + count)

    def settled_tokens(self, num_tokens: int) -> int:
        """Return how many of the first tokens, in whole blocks, stay as they are while others follow."""
        if self.device_tokens:
            settled = self.first_tokens + self.middle.settled_tokens(self.host_tokens)
            return settled if num_tokens >= self.first_tokens else 0
        if self.is_quantized:
            return self.sink_tokens + self.quantized_blocks * GRANULE if num_tokens >= self.sink_tokens else 0
        return num_tokens // GRANULE * GRANULE

    @property
    def most_full_tokens(self) -> int:
        """Largest number of tokens beside quantized blocks that are in full precision at once."""
        return self.sink_tokens - self.first_tokens + RECENT_TOKENS + GRANULE

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
    def middle(self) -> "Layout":
        """The layout of the tokens that are not on the device, as if there were no others."""
        if not self.device_tokens:
            return self
        return replace(self, sink_tokens=self.sink_tokens - self.first_tokens, device_tokens=0, host_tokens=0)

    @property
    def after_prefix(self) -> "Layout":
        """The empty layout of the tails of a prefix, which holds the first tokens of this layout."""
        device_tokens = self.device_tokens and self.device_tokens - self.first_tokens
        return replace(self, sink_tokens=0, device_tokens=device_tokens, quantized_blocks=0, host_tokens=0)

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
    def _changes_at(self) -> int:
        """The least number of tokens that moves a border."""
        if self.device_tokens:
            return self.host_tokens + self.device_tokens + 1
        return self.most_full_tokens + self.quantized_blocks * GRANULE if self.is_quantized else sys.maxsize

    @cached_property
    def _leaving_at_once(self) -> int:
        blocks = int((self.device_tokens - self.first_tokens) * _LEAVING_AT_ONCE) // GRANULE
        return max(1, blocks) * GRANULE
