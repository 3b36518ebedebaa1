"""The distribution of a sequence's blocks over several processes, in plain ints."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .memory.growth import GRANULE


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
