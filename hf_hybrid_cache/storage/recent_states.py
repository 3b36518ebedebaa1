"""Keys and values of a quantized layer that later tokens would quantize."""

from typing import NamedTuple

import torch

from .kv_store import Pair


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
