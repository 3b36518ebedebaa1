"""Interface between a store and the form of its quantized blocks. The forms themselves are in `codecs/`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..scalars import as_integer
from .kv_shape import KVShape, Pair
from .memory.growth import GRANULE


class Codec(ABC):
    """
    Quantizes blocks of 64 tokens of keys, or of values, to packed blocks, one for each block and head.

    Each form has a subclass. A packed block holds everything that is needed to read it, so code that does not know its
    form can move, select and drop it.

    Attributes:
        bits: bits of a code.
    """

    bits: int

    @abstractmethod
    def packed_bytes(self, head_dim: int) -> int:
        """Return the bytes of one packed block of states of this width."""

    @property
    def is_fitted(self) -> bool:
        """Whether the codec can quantize; otherwise the first states choose its form, see `fitted`."""
        return True

    def fitted(self, states: torch.Tensor, query_squares: torch.Tensor | None) -> "Codec":
        """
        Return the form of this codec for a layer. Its packed blocks have as many bytes.

        Args:
            states: of the first tokens, `[batch, num_kv_heads, blocks * 64, head_dim]`.
            query_squares: `[num_kv_heads, head_dim]`, means over queries that attend to these keys; `None` if there
                were none, and for values.
        """
        return self

    def wider(self) -> "Codec | None":
        """Return the codec of this kind with more bits, its form still to be chosen; `None` if there is none."""
        return None

    def excess(self, states: torch.Tensor, query_squares: torch.Tensor | None) -> float:
        """
        Return the error of attention with codes of `states`, as a multiple of the usual error with as many bits.

        Arguments are those of `fitted`. The result is 0 if the error is unknown.
        """
        return 0.0

    def require_fit(self, num_kv_heads: int, head_dim: int) -> None:  # noqa: B027
        """
        Check that the codec can quantize states of this shape.

        Raises:
            ValueError: it was chosen for another shape.
        """

    @abstractmethod
    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """
        Quantize whole blocks; there may be none.

        Args:
            states: `[batch, num_kv_heads, blocks * 64, head_dim]`, of any floating type, on any device.

        Returns:
            uint8 `[batch, num_kv_heads, blocks, packed_bytes]`, on that device.

        Raises:
            ValueError: some of the states are infinite or not a number.
        """

    @abstractmethod
    def decode(self, packed: torch.Tensor, states: torch.Tensor) -> None:
        """Dequantize `packed` into `states`; shapes are those of `encode`."""


@dataclass(frozen=True)
class KVCodec:
    """
    The codecs of a layer's keys and values, and options of their quantization.

    Attributes:
        keys: codec of blocks of keys.
        values: codec of blocks of values.
        sink_tokens: first tokens that stay in full precision, filled up to whole blocks of 64.
        auto_bits: give keys, or values, more bits if their codes lose far more than is usual with as many bits.

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
        """Whether both codecs can quantize."""
        return self.keys.is_fitted and self.values.is_fitted


class Allowance:
    """
    Extra memory for more bits, which the layers of a cache share.

    Attributes:
        left: memory that is left, in units of a layer with the bits that were asked for.
    """

    def __init__(self, num_layers: int):
        self.left = _MOST_MORE * num_layers

    def takes(self, more: float) -> bool:
        """Take this much memory if it is left, and return whether it was."""
        if more > self.left:
            return False
        self.left -= more
        return True


class SeenQueries(NamedTuple):
    """
    The queries by which a codec is to be chosen.

    Attributes:
        squares: means of their squares, float32 `[num_kv_heads, head_dim]`.
        number: how many there were.
    """

    squares: torch.Tensor
    number: int


def mean_squares(queries: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return the mean squares of queries, `[..., batch, heads, queries, dim]`, of each KV head, `[..., heads, dim]`."""
    # A query that is not finite makes its step useless; it must not make the choice useless, too.
    squares = queries.detach().float().square().nan_to_num_(0.0, 0.0, 0.0)
    return squares.unflatten(-3, (num_kv_heads, -1)).mean(dim=(-5, -3, -2))


class CodecChoice:
    """
    The codec of one layer: as given, or a form that is chosen once, with the first quantized blocks.

    Args:
        codec: the codec that was asked for.
        allowance: memory for more bits.

    Attributes:
        asked_for: the codec that was asked for.
        codec: the same, or its chosen form.
        is_made: whether it can quantize.
        seen_queries: those that were seen so far.
    """

    def __init__(self, codec: KVCodec, allowance: Allowance):
        self.asked_for = codec
        self._allowance = allowance
        self.seen_queries: SeenQueries | None = None
        self.take(codec)

    @property
    def num_lacking(self) -> int:
        """Number of queries of passes of few tokens that are still noted."""
        known = 0 if self.seen_queries is None else self.seen_queries.number
        return 0 if self.is_made else max(0, _ENOUGH_QUERIES - known)

    def take(self, codec: KVCodec) -> None:
        """Let the codec be this one."""
        self.codec, self.is_made = codec, codec.is_fitted

    def observe(self, query: torch.Tensor, shape: KVShape) -> None:
        """Take note of queries that attend to keys of `shape`, `[batch, query_heads, query_length, head_dim]`."""
        batch, heads, length, key_dim = query.shape if query.dim() == 4 else (0, 0, 0, 0)
        num_kv_heads = shape.num_kv_heads
        if self.is_made or not length or (batch, key_dim) != (shape.batch, shape.key_dim) or heads % num_kv_heads:
            return
        if length <= _ENOUGH_QUERIES:
            query = query[:, :, : self.num_lacking]
            length = query.shape[2]
            if not length:
                return
        step = -(-length // _MOST_QUERIES)
        squares, number, known = mean_squares(query[:, :, ::step], num_kv_heads), length, self.seen_queries
        if known is not None:
            number += known.number
            squares = known.squares.to(squares.device).lerp(squares, length / number)
        self.seen_queries = SeenQueries(squares, number)

    def make(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Choose the codec by some blocks of states, `[batch, num_kv_heads, tokens, head_dim]`."""
        blocks = keys.shape[2] // GRANULE
        picked = sorted({index * blocks // _SAMPLED_BLOCKS for index in range(_SAMPLED_BLOCKS)})
        keys, values = (
            each[:, :, : blocks * GRANULE].unflatten(2, (blocks, GRANULE))[:, :, picked].flatten(2, 3)
            for each in (keys, values)
        )
        codec, seen = self.codec, self.seen_queries
        squares = None if seen is None else seen.squares.to(keys.device)
        fitted = codec.keys.fitted(keys, squares), codec.values.fitted(values, None)
        if codec.auto_bits:
            sizes = [each.packed_bytes(states.shape[3]) for each, states in zip(fitted, (keys, values), strict=True)]
            fitted = (
                self._wide_enough(fitted[0], keys, squares, sum(sizes)),
                self._wide_enough(fitted[1], values, None, sum(sizes)),
            )
        self.take(replace(codec, keys=fitted[0], values=fitted[1]))

    def encode(self, read: Callable[[int, int], Pair], num_tokens: int) -> Pair:
        """
        Quantize the first `num_tokens`, whole blocks that `read` gives, on their device.

        Raises:
            ValueError: there are no codes for some of them.
        """
        pieces = []
        for start in range(0, num_tokens, _QUANTIZED_AT_ONCE):
            keys, values = read(start, min(start + _QUANTIZED_AT_ONCE, num_tokens))
            pieces.append((self.codec.keys.encode(keys), self.codec.values.encode(values)))
        of_keys, of_values = (torch.cat(packed, dim=2) for packed in zip(*pieces, strict=True))
        return of_keys, of_values

    def decode(self, packed: Pair, states: Pair) -> None:
        """Dequantize packed blocks into `states`, `[batch, num_kv_heads, blocks * 64, head_dim]`."""
        self.codec.keys.decode(packed[0], states[0])
        self.codec.values.decode(packed[1], states[1])

    def packed_shape(self, shape: KVShape) -> KVShape:
        """Return the shape of the packed blocks of states of `shape`, seen as states themselves."""
        return shape._replace(
            key_dim=self.codec.keys.packed_bytes(shape.key_dim),
            value_dim=self.codec.values.packed_bytes(shape.value_dim),
            key_dtype=torch.uint8,
            value_dtype=torch.uint8,
        )

    def _wide_enough(
        self, codec: Codec, states: torch.Tensor, query_squares: torch.Tensor | None, layer_bytes: int
    ) -> Codec:
        """Return the codec, or one with more bits if its error is too large and memory is left."""
        wider = codec.wider()
        if wider is None or codec.excess(states, query_squares) <= _MOST_EXCESS:
            return codec
        more = wider.packed_bytes(states.shape[3]) - codec.packed_bytes(states.shape[3])
        if not self._allowance.takes(more / layer_bytes):
            return codec
        return self._wide_enough(wider.fitted(states, query_squares), states, query_squares, layer_bytes)


# Of passes of so few queries no more are noted once so many were: a decode step would take a fifth longer.
_ENOUGH_QUERIES = 64
_MOST_QUERIES = 512
# Blocks by which a codec is chosen, spread over the first states that are quantized.
_SAMPLED_BLOCKS = 16
_QUANTIZED_AT_ONCE = 64 * GRANULE
# A larger multiple of the usual error asks for more bits, which take at most this fraction of a layer's memory.
_MOST_EXCESS, _MOST_MORE = 2.5, 0.5
