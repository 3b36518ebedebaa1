"""Where the tokens of a layer are: on the device or in host memory, quantized or not, with this process or another."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from .growth import GRANULE
from .shard import Shard

# Tokens that are not quantized yet, at least: what assisted decoding takes back is among them.
RECENT_TOKENS = GRANULE
# Of the tokens on the device, as many leave it at once, so that the others are seldom moved.
_LEAVING_AT_ONCE = 1 / 8


@dataclass(frozen=True)
class Layout:
    """
    Borders between the tokens of one layer. Only they are kept, so most new tokens change nothing.

    Example, sink_tokens=64, is_quantized=True, device_tokens=192, 500 tokens:
        device [0..63]   host, quantized [64..319]   host, recent [320..383]   device [384..499]

    Attributes:
        sink_tokens: first tokens that are never quantized, whole blocks; on the device where they leave it a block.
        is_quantized: blocks are quantized once 64 tokens of the same place have come after them.
        device_tokens: on the device at most, if the middle is in host memory; 0 if all tokens are in one place.
        shard: the tokens of this process.
        quantized_blocks: after the sinks, of all processes.
        host_tokens: after the first ones on the device, whole blocks until tokens are removed.
    """

    sink_tokens: int = GRANULE
    is_quantized: bool = False
    device_tokens: int = 0
    shard: Shard = Shard.ALL
    quantized_blocks: int = 0
    host_tokens: int = 0

    def after(self, num_tokens: int) -> "Layout":
        """The layout once there are `num_tokens`: itself, unless a block is quantized or tokens leave the device."""
        if num_tokens < self._changes_at:
            return self
        host_tokens, quantized_blocks = self.host_tokens, self.quantized_blocks
        if self.device_tokens:
            too_many = num_tokens - host_tokens - self.device_tokens
            host_tokens += -(-too_many // self._leaving_at_once) * self._leaving_at_once
            num_tokens = self.first_tokens + host_tokens
        if self.is_quantized:
            due = (num_tokens - self.sink_tokens - RECENT_TOKENS) // GRANULE
            quantized_blocks = max(quantized_blocks, due)
        return replace(self, host_tokens=host_tokens, quantized_blocks=quantized_blocks)

    def growing(self, lengths: Iterable[int]) -> "list[Layout]":
        """The layouts once there are as many tokens as each of `lengths`, one after the other."""
        return list(accumulate(lengths, Layout.after, initial=self))[1:]

    def holding(self, full_tokens: int, quantized_blocks: int) -> "Layout":
        """The layout of a split layer, without a history, that has so many tokens in full precision and blocks."""
        host_tokens = self.after(full_tokens).host_tokens
        if quantized_blocks:
            # After quantized blocks come tokens that are not, as when they were quantized.
            recent = self.middle.sink_tokens + RECENT_TOKENS
            host_tokens = max(host_tokens, min(recent, full_tokens - self.first_tokens)) + quantized_blocks * GRANULE
        return replace(self, host_tokens=host_tokens, quantized_blocks=quantized_blocks)

    def cropped(self, num_tokens: int) -> "Layout":
        """The layout of the first `num_tokens`: a block of which not all tokens are left is not quantized any more."""
        host_tokens = min(self.host_tokens, max(0, num_tokens - self.first_tokens))
        quantized_blocks = min(self.quantized_blocks, max(0, num_tokens - self.sink_tokens) // GRANULE)
        return replace(self, host_tokens=host_tokens, quantized_blocks=quantized_blocks)

    @cached_property
    def first_tokens(self) -> int:
        """Tokens on the device that come before those in host memory, once there are so many."""
        return self.sink_tokens if self.device_tokens >= self.sink_tokens + GRANULE else 0

    def indexed_blocks(self, num_tokens: int) -> range:
        """Numbers of the blocks that a key index is made of, where tokens are in one place: no first and last ones."""
        first = self.sink_tokens // GRANULE if self.is_quantized else 1
        count = self.quantized_blocks if self.is_quantized else max(0, (num_tokens - RECENT_TOKENS) // GRANULE - 1)
        return range(first, first + count)

    def settled_tokens(self, num_tokens: int) -> int:
        """First ones of so many tokens, whole blocks, that stay as they are while others follow."""
        if self.device_tokens:
            settled = self.first_tokens + self.middle.settled_tokens(self.host_tokens)
            return settled if num_tokens >= self.first_tokens else 0
        if self.is_quantized:
            return self.sink_tokens + self.quantized_blocks * GRANULE if num_tokens >= self.sink_tokens else 0
        return num_tokens // GRANULE * GRANULE

    @property
    def most_full_tokens(self) -> int:
        """Tokens of a quantized layer that are in full precision at once, at most."""
        return self.sink_tokens + RECENT_TOKENS + GRANULE

    def parts(self, num_tokens: int) -> dict[str, tuple[int, tuple[range, ...]]]:
        """Entries of all processes, by the names of parts in a file, and the numbers of their blocks in order."""
        blocks, quantized = -(-num_tokens // GRANULE), self.quantized_blocks
        if not self.is_quantized:
            return {"states": (num_tokens, (range(blocks),))}
        first = min(self.sink_tokens // GRANULE, blocks)
        last = first + quantized
        full = num_tokens - quantized * GRANULE, (range(first), range(last, blocks))
        return {"full": full, "packed": (quantized, (range(first, last),))}

    @property
    def middle(self) -> "Layout":
        """The layout of the tokens in host memory alone, as if there were no others."""
        return replace(self, sink_tokens=self.sink_tokens - self.first_tokens, device_tokens=0, host_tokens=0)

    @property
    def after_prefix(self) -> "Layout":
        """The layout, of no tokens, of those that follow others in which the first ones of this layout are."""
        device_tokens = self.device_tokens and self.device_tokens - self.first_tokens
        return replace(self, sink_tokens=0, device_tokens=device_tokens, quantized_blocks=0, host_tokens=0)

    @cached_property
    def own_sink_tokens(self) -> int:
        """Sinks that this process keeps."""
        return self.shard.tokens(self.sink_tokens)

    @cached_property
    def own_quantized_blocks(self) -> int:
        """Quantized blocks that this process keeps."""
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
