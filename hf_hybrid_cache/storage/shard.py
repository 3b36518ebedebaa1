"""Which tokens of a sequence are kept by which of several processes. Plain ints."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .growth import GRANULE


@dataclass(frozen=True)
class Shard:
    """
    Every `size`-th block of 64 tokens: block `b` is kept by rank `b % size`.

    So a new block goes to a process that has the least, wherever a sequence was cut off before, and each knows what the
    others keep.

    Attributes:
        rank: whose share it is.
        size: of the group.
    """

    rank: int
    size: int

    ALL: ClassVar["Shard"]

    @property
    def is_all(self) -> bool:
        """Whether everything is kept."""
        return self.size == 1

    def owns(self, blocks: Any) -> Any:
        """Whether a block, or each of a tensor of blocks, is kept; by number."""
        return blocks % self.size == self.rank

    def blocks(self, num_blocks: int) -> int:
        """Own blocks among the first `num_blocks`."""
        return max(0, (num_blocks - self.rank + self.size - 1) // self.size)

    def tokens(self, num_tokens: int) -> int:
        """Own tokens among the first `num_tokens`."""
        block, rest = divmod(num_tokens, GRANULE)
        return self.blocks(block) * GRANULE + (rest if self.owns(block) else 0)

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Own tokens from `start` to `end`, int64."""
        tokens = torch.arange(start, end)
        return tokens[self.owns(tokens // GRANULE)]

    def part(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """Own tokens of states `[batch, heads, tokens, head_dim]` whose first one is token `start` of the sequence."""
        count = states.shape[2]
        if self.is_all:
            return states
        if start // GRANULE == (start + count - 1) // GRANULE:  # a decode step: few operations
            return states if self.owns(start // GRANULE) else states[:, :, :0]
        return states.index_select(2, (self.positions(start, start + count) - start).to(states.device))


Shard.ALL = Shard(0, 1)
