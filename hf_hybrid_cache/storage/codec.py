"""What a store needs of the form that quantized blocks have. The forms themselves are in `codecs/`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from ..scalars import as_integer
from .growth import GRANULE


class Codec(ABC):
    """
    Codes blocks of 64 tokens of keys, or of values, as packed blocks of bytes, one for each block and head.

    One subclass for each form. A packed block holds everything that is needed to read it, so that packed blocks can be
    moved, selected and dropped by who knows nothing of their form.

    Attributes:
        bits: of the code of a number.
    """

    bits: int

    @abstractmethod
    def packed_bytes(self, head_dim: int) -> int:
        """Bytes of one packed block of states of this width."""

    @property
    def is_fitted(self) -> bool:
        """Whether it can code; a codec that is not has its form chosen by the first states, see `fitted`."""
        return True

    def fitted(self, states: torch.Tensor, query_squares: torch.Tensor | None) -> "Codec":
        """
        The form of this codec for a layer, whose packed blocks have as many bytes.

        Args:
            states: of the first tokens, `[batch, num_kv_heads, blocks * 64, head_dim]`.
            query_squares: `[num_kv_heads, head_dim]`, means over queries that attend to these keys; `None` if there
                were none, and for values.
        """
        return self

    def wider(self) -> "Codec | None":
        """The codec of this kind with more bits, still to be chosen; `None` if there is none."""
        return None

    def excess(self, states: torch.Tensor, query_squares: torch.Tensor | None) -> float:
        """
        The error that this codec makes of `states` in attention, of the one that is usual with as many bits.

        Arguments are those of `fitted`; 0 where there is no telling.
        """
        return 0.0

    def require_fit(self, num_kv_heads: int, head_dim: int) -> None:  # noqa: B027
        """
        Check that it can code states of this shape.

        Raises:
            ValueError: it was chosen for another one.
        """

    @abstractmethod
    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """
        Code whole blocks; there may be none.

        Args:
            states: `[batch, num_kv_heads, blocks * 64, head_dim]`, of any floating type, on any device.

        Returns:
            uint8 `[batch, num_kv_heads, blocks, packed_bytes]`, there.

        Raises:
            ValueError: some of the states are infinite or not a number.
        """

    @abstractmethod
    def decode(self, packed: torch.Tensor, states: torch.Tensor) -> None:
        """Write what `packed` stand for into `states`; shapes are those of `encode`."""


@dataclass(frozen=True)
class KVCodec:
    """
    How a layer's keys and values are quantized.

    Attributes:
        keys: codes blocks of keys.
        values: codes blocks of values.
        sink_tokens: first tokens that stay in full precision, filled up to whole blocks of 64.
        auto_bits: give keys, or values, more bits where codes lose far more than is usual with so many.

    Raises:
        ValueError: `sink_tokens` is not an integer of at least 0.
    """

    keys: Codec
    values: Codec
    sink_tokens: int = GRANULE
    auto_bits: bool = False

    def __post_init__(self) -> None:
        sink_tokens = as_integer(self.sink_tokens)
        if sink_tokens is None or sink_tokens < 0:
            raise ValueError(f"sink_tokens must be an integer of at least 0, got {self.sink_tokens!r}.")
        object.__setattr__(self, "sink_tokens", -(-sink_tokens // GRANULE) * GRANULE)

    def __str__(self) -> str:
        return f"keys {self.keys}, values {self.values}"

    @property
    def is_fitted(self) -> bool:
        """Whether both can code."""
        return self.keys.is_fitted and self.values.is_fitted


class Allowance:
    """
    Memory that layers may take beyond what was asked for, shared by those of a cache.

    Attributes:
        left: in units of what a layer takes with the bits that were asked for.
    """

    def __init__(self, num_layers: int):
        self.left = _MOST_MORE * num_layers

    def takes(self, more: float) -> bool:
        """Whether there is room for that much more, which is taken then."""
        if more > self.left:
            return False
        self.left -= more
        return True


class CodecChoice:
    """
    How one layer is quantized: as given, or chosen when the first blocks are quantized, for good.

    Args:
        codec: that was asked for.
        allowance: for more bits.

    Attributes:
        codec: that one, or the form of it that was chosen.
    """

    def __init__(self, codec: KVCodec, allowance: Allowance):
        self.codec = codec
        self._allowance = allowance
        self._query_squares: torch.Tensor | None = None
        self._num_queries = 0

    @property
    def is_made(self) -> bool:
        return self.codec.is_fitted

    def observe(self, query: torch.Tensor, num_kv_heads: int) -> None:
        """Take note of queries that attend to the layer's keys, `[batch, query_heads, query_length, head_dim]`."""
        step = -(-query.shape[2] // _MOST_QUERIES)
        seen = query.detach()[:, :, ::step].float().square()
        # A query that is not finite makes a step useless, and must not make the choice so.
        squares = torch.nan_to_num(seen, 0.0, 0.0, 0.0).unflatten(1, (num_kv_heads, -1)).mean(dim=(0, 2, 3))
        num_queries, known = query.shape[2], self._query_squares
        self._num_queries += num_queries
        if known is None:
            self._query_squares = squares
        else:
            self._query_squares = known.lerp(squares.to(known.device), num_queries / self._num_queries)

    def make(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Choose by states of the first tokens, `[batch, num_kv_heads, blocks * 64, head_dim]`."""
        codec, squares = self.codec, self._query_squares
        fitted = codec.keys.fitted(keys, squares), codec.values.fitted(values, None)
        if codec.auto_bits:
            sizes = [each.packed_bytes(states.shape[3]) for each, states in zip(fitted, (keys, values), strict=True)]
            fitted = (
                self._wide_enough(fitted[0], keys, squares, sum(sizes)),
                self._wide_enough(fitted[1], values, None, sum(sizes)),
            )
        self.codec = replace(codec, keys=fitted[0], values=fitted[1])

    def _wide_enough(
        self, codec: Codec, states: torch.Tensor, query_squares: torch.Tensor | None, layer_bytes: int
    ) -> Codec:
        """The codec, or one with more bits if its error is too large and there is room."""
        wider = codec.wider()
        if wider is None or codec.excess(states, query_squares) <= _MOST_EXCESS:
            return codec
        more = wider.packed_bytes(states.shape[3]) - codec.packed_bytes(states.shape[3])
        if not self._allowance.takes(more / layer_bytes):
            return codec
        return self._wide_enough(wider.fitted(states, query_squares), states, query_squares, layer_bytes)


_MOST_QUERIES = 512
# Of the error that is usual; of the memory that was asked for.
_MOST_EXCESS, _MOST_MORE = 2.5, 0.5
