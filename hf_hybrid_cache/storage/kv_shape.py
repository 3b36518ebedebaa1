"""The shape and types of keys and values."""

from typing import NamedTuple

import numpy as np
import torch

# Tensors of keys and of values.
Pair = tuple[torch.Tensor, torch.Tensor]
# Numba has no name for bfloat16 and half precision: kernels read them as unsigned and as signed 16-bit integers.
_ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}


def kernel_element(dtype: torch.dtype) -> np.dtype | None:
    """Return the NumPy type by which kernels read blocks of `dtype`; `None` if there is no kernel for it."""
    return np.dtype(_ELEMENTS[dtype]) if dtype in _ELEMENTS else None


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
        """
        Return the shape of states `[batch, num_kv_heads, tokens, head_dim]`.

        Raises:
            ValueError: they do not fit each other.
        """
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.device != values.device:
            raise ValueError(
                "Keys and values must be [batch, num_kv_heads, tokens, head_dim] with the same first three sizes on "
                f"one device, got {list(keys.shape)} on {keys.device} and {list(values.shape)} on {values.device}."
            )
        batch, num_kv_heads, _, key_dim = keys.shape
        return cls(batch, num_kv_heads, key_dim, values.shape[3], keys.dtype, values.dtype, keys.device)

    def promoted_with(self, other: "KVShape") -> "KVShape":
        """Return the shape with types that hold states of both shapes."""
        return self._replace(
            key_dtype=torch.promote_types(self.key_dtype, other.key_dtype),
            value_dtype=torch.promote_types(self.value_dtype, other.value_dtype),
        )

    def empty(self, num_tokens: int, device: torch.device | None = None) -> Pair:
        """Make keys and values of so many tokens with any content, on their device or another one."""
        keys, values = (
            torch.empty(*sizes[:2], num_tokens, sizes[2], dtype=dtype, device=device or self.device)
            for sizes, dtype in ((self.keys, self.key_dtype), (self.values, self.value_dtype))
        )
        return keys, values

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
