"""What a layer needs of the place where its keys and values are kept."""

import copy
from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import numpy as np
import torch

from .block_buffer import kernel_element
from .growth import grown_capacity
from .host_memory import HostBudget, HostMemoryError, require_host_bytes
from .token_buffer import TokenBuffer


class KVShape(NamedTuple):
    """
    What is constant about a layer's keys and values. They share batch and heads, not always width and dtype.

    A tuple, because one is made and compared for every layer of every token.
    """

    batch: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> "KVShape":
        """The shape of states `[batch, num_kv_heads, tokens, head_dim]`."""
        batch, num_kv_heads, _, key_dim = keys.shape
        return cls(batch, num_kv_heads, key_dim, values.shape[3], keys.dtype, values.dtype, keys.device)

    @property
    def keys(self) -> tuple[int, int, int]:
        return (self.batch, self.num_kv_heads, self.key_dim)

    @property
    def values(self) -> tuple[int, int, int]:
        return (self.batch, self.num_kv_heads, self.value_dim)

    @property
    def element(self) -> np.dtype | None:
        """What kernels see blocks of these states as; `None` if they cannot read them."""
        return kernel_element(self.key_dtype) if self.key_dtype == self.value_dtype else None

    def __str__(self) -> str:
        dims = f"{self.key_dim}" if self.key_dim == self.value_dim else f"{self.key_dim} and {self.value_dim}"
        dtypes = str(self.key_dtype) if self.key_dtype == self.value_dtype else f"{self.key_dtype}, {self.value_dtype}"
        return f"batch {self.batch}, {self.num_kv_heads} KV heads, head_dim {dims}, {dtypes} on {self.device}"


class KVStore(ABC):
    """
    Keys and values of one layer. One subclass per place where they live.

    Args:
        shape: of the states that are stored.
        keys: the truth about the keys.
        values: the truth about the values.
        budget: asked before host memory is used.

    Attributes:
        num_tokens: tokens stored; `keys` and `values` hold that many each.
    """

    def __init__(self, shape: KVShape, keys: TokenBuffer, values: TokenBuffer, budget: HostBudget):
        self.shape = shape
        self.keys, self.values = keys, values
        self.num_tokens = 0
        self._budget = budget
        self._approved_tokens = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over the whole batch."""
        return self.keys.bytes_per_token + self.values.bytes_per_token

    @abstractmethod
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Store the states of new tokens, `[batch, num_kv_heads, new_tokens, head_dim]`.

        Returns:
            All keys and all values, `[batch, num_kv_heads, num_tokens, head_dim]`, on the compute device.

        Raises:
            HostMemoryError: the host has no room for them; nothing has changed then.
        """

    @abstractmethod
    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new states like `append`, without bringing the others to the device; any device and type will do."""

    @abstractmethod
    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, on the compute device."""

    def settle(self) -> None:  # noqa: B027
        """Let the calling thread wait until no copy reads or writes the truth, and all of it is there."""

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`, which are at most as many as there are."""
        self.num_tokens = num_tokens

    def select_batch(self, indices: torch.Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was."""
        indices = indices.to(self.keys.device)
        self.keys = self.keys.select_batch(indices, self.num_tokens)
        self.values = self.values.select_batch(indices, self.num_tokens)
        self.shape = self.shape._replace(batch=len(indices))
        self._budget.note(self, self._approved_tokens, self.bytes_per_token)

    def close(self) -> None:  # noqa: B027
        """Give back what is shared with other layers. The store must not be used afterwards."""

    def _duplicate(self, memo: dict) -> Self:
        """A copy with buffers and a budget of its own, to be completed by `__deepcopy__`."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._budget = copy.deepcopy(self._budget, memo)
        twin._approved_tokens = 0
        if self.keys.device.type == "cpu":
            require_host_bytes(self.num_tokens * self.bytes_per_token, f"A copy of {self.num_tokens:,} tokens needs")
            # What the copy holds from the start must not be asked for again when it grows.
            twin._approved_tokens = self.num_tokens
            twin._budget.note(twin, self.num_tokens, self.bytes_per_token)
        twin.keys = self.keys.duplicate(self.num_tokens)
        twin.values = self.values.duplicate(self.num_tokens)
        return twin

    def _make_room(self, num_tokens: int) -> None:
        """Let the truth have room for `num_tokens`, asking for host memory a chunk ahead."""
        if num_tokens > self._approved_tokens and self.keys.device.type == "cpu":
            ahead = grown_capacity(num_tokens)
            try:
                self._budget.grow(self, ahead, self.bytes_per_token)
            except HostMemoryError:
                # The last tokens that fit are not refused for the sake of those after them.
                self._budget.grow(self, num_tokens, self.bytes_per_token)
                ahead = num_tokens
            self._approved_tokens = ahead
        self.keys.ensure(num_tokens, self.num_tokens)
        self.values.ensure(num_tokens, self.num_tokens)
