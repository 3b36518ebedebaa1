"""What a store needs of the form that coded blocks have. The forms themselves are in `codecs/`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .growth import GRANULE


class Codec(ABC):
    """
    Codes blocks of 64 tokens of keys, or of values, as records of bytes, one for each block and head.

    One subclass for each form. A record holds everything that is needed to read it, so that records can be moved,
    selected and dropped by who knows nothing of their form.
    """

    @abstractmethod
    def record_bytes(self, head_dim: int) -> int:
        """Bytes of one record of states of this width."""

    @abstractmethod
    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """
        Code whole blocks; there may be none.

        Args:
            states: `[batch, num_kv_heads, blocks * 64, head_dim]`, of any floating type, on any device.

        Returns:
            uint8 `[batch, num_kv_heads, blocks, record_bytes]`, there.

        Raises:
            ValueError: some of the states are infinite or not a number.
        """

    @abstractmethod
    def decode(self, records: torch.Tensor, states: torch.Tensor) -> None:
        """Write what `records` stand for into `states`; shapes are those of `encode`."""


@dataclass(frozen=True)
class KVCodec:
    """
    How a layer's keys and values are coded.

    Attributes:
        keys: codes blocks of keys.
        values: codes blocks of values.
        sink_tokens: first tokens that stay in full precision, filled up to whole blocks of 64.

    Raises:
        ValueError: `sink_tokens` is not an integer of at least 0.
    """

    keys: Codec
    values: Codec
    sink_tokens: int = GRANULE

    def __post_init__(self) -> None:
        given = self.sink_tokens
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ValueError(f"sink_tokens must be an integer of at least 0, got {given!r}.")
        object.__setattr__(self, "sink_tokens", -(-given // GRANULE) * GRANULE)
