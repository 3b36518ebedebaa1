"""Interface of what keeps keys and values."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from .buffers.block_buffer import kernel_element
from .buffers.token_buffer import TokenBuffer

# Tensors of keys and of values.
Pair = tuple[torch.Tensor, torch.Tensor]


class KVShape(NamedTuple):
    """
    The shape and types of a layer's keys and values. They share batch and heads, not always width and type.

    It is a tuple, because one is made and compared for every layer of every token.
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
        """Return the shape of states `[batch, num_kv_heads, tokens, head_dim]`."""
        batch, num_kv_heads, _, key_dim = keys.shape
        return cls(batch, num_kv_heads, key_dim, values.shape[3], keys.dtype, values.dtype, keys.device)

    def promoted_with(self, other: "KVShape") -> "KVShape":
        """Return the shape with types that hold states of both shapes."""
        return self._replace(
            key_dtype=torch.promote_types(self.key_dtype, other.key_dtype),
            value_dtype=torch.promote_types(self.value_dtype, other.value_dtype),
        )

    @property
    def keys(self) -> tuple[int, int, int]:
        return (self.batch, self.num_kv_heads, self.key_dim)

    @property
    def values(self) -> tuple[int, int, int]:
        return (self.batch, self.num_kv_heads, self.value_dim)

    @property
    def token_bytes(self) -> tuple[int, int]:
        """Bytes of one token's keys, and of its values, in all sequences."""
        heads = self.batch * self.num_kv_heads
        return heads * self.key_dim * self.key_dtype.itemsize, heads * self.value_dim * self.value_dtype.itemsize

    @property
    def element(self) -> np.dtype | None:
        """The NumPy type by which kernels read blocks of these states; `None` if they cannot."""
        return kernel_element(self.key_dtype) if self.key_dtype == self.value_dtype else None

    def __str__(self) -> str:
        dims = f"{self.key_dim}" if self.key_dim == self.value_dim else f"{self.key_dim} and {self.value_dim}"
        dtypes = str(self.key_dtype) if self.key_dtype == self.value_dtype else f"{self.key_dtype}, {self.value_dtype}"
        return f"batch {self.batch}, {self.num_kv_heads} KV heads, head_dim {dims}, {dtypes} on {self.device}"


class KVStore(ABC):
    """
    Keys and values that grow at their end: those of a layer, or a segment of them.

    Args:
        shape: of the states that are stored.

    Attributes:
        num_tokens: tokens stored.
        version: counts changes of what is stored.
    """

    def __init__(self, shape: KVShape):
        self.shape = shape
        self.num_tokens = 0
        self.version = 0
        self._is_changing = False

    @property
    def is_intact(self) -> bool:
        """Whether the store is whole; it is not after a change that ended half-way."""
        return not self._is_changing

    @abstractmethod
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """
        Store the states of new tokens, `[batch, num_kv_heads, new_tokens, head_dim]`.

        Returns:
            All keys and all values, `[batch, num_kv_heads, num_tokens, head_dim]`, on the compute device.

        Raises:
            HostMemoryError: the host has no room for them; nothing has changed then.

        After any other error the tokens are those of before, or the new ones too, or `is_intact` is false.
        """

    @abstractmethod
    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new states, of any device and type, like `append`, but without bringing the others to the device."""

    @abstractmethod
    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new states, and start the copies to the device of those that it uses, without waiting for them."""

    @abstractmethod
    def read(self) -> Pair:
        """Return all keys and values, on the compute device."""

    def read_copy(self) -> Pair:
        """Return all keys and values, contiguous, in memory that is not the store's."""
        keys, values = (each.clone(memory_format=torch.contiguous_format) for each in self.read())
        return keys, values

    @abstractmethod
    def buffers(self) -> Iterable[TokenBuffer]:
        """Return all buffers that hold memory for this layer alone."""

    @abstractmethod
    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`, which are at most as many as there are."""

    @abstractmethod
    def select_batch(self, indices: torch.Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was."""

    def wait_for_copies(self) -> None:  # noqa: B027
        """Block the calling thread until no copy reads or writes the stored states, and all of them are there."""

    def wait_until_stored(self) -> None:
        """Block the calling thread until all stored states are there; copies may still read them."""
        self.wait_for_copies()

    def close(self) -> None:
        """Give back memory that is shared with other layers. The store must not be used afterwards."""
        self.version += 1

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the store as not whole if the change inside ends half-way."""
        self._is_changing = True
        yield
        self._is_changing = False

    def _set_length(self, num_tokens: int) -> None:
        self.version += 1  # first: after an interruption here, earlier handles are stale
        self.num_tokens = num_tokens
