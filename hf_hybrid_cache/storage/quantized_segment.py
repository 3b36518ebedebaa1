"""The quantized blocks of a layer, and the choice of their codec."""

from collections.abc import Callable

import torch

from .codec import Codec, CodecChoice, KVCodec
from .joined_states import JoinedStates
from .kv_store import KVShape, Pair
from .memory.growth import GRANULE
from .runs.run import Run

_QUANTIZED_AT_ONCE = 64 * GRANULE
# Blocks by which a codec is chosen, spread over the first states that are quantized.
_SAMPLED_BLOCKS = 16


class QuantizedSegment:
    """
    Quantized blocks of one layer, as packed blocks in a segment whose form depends on the codec.

    Until the codec is chosen, states that are due wait in full precision for the queries that attend to them, or for
    another use of the layer: they are pending.

    Args:
        shape: of the states.
        choice: the codec, given or still to be chosen.
        make_packed: makes the segment for packed blocks of some shape, an entry for each block.

    Attributes:
        packed: the packed blocks.
        pending: keys and values that wait, in pieces.
    """

    def __init__(self, shape: KVShape, choice: CodecChoice, make_packed: Callable[[KVShape], Run]):
        self._shape, self._choice, self._make_packed = shape, choice, make_packed
        self.packed = make_packed(self._packed_shape)
        self.pending: tuple[Pair, ...] = ()

    @property
    def codec(self) -> KVCodec:
        """The codec of the blocks."""
        return self._choice.codec

    @property
    def is_chosen(self) -> bool:
        """Whether the codec is chosen."""
        return self._choice.is_made

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.packed.num_entries

    @property
    def pending_tokens(self) -> int:
        """Number of tokens that wait."""
        return sum(keys.shape[2] for keys, _ in self.pending)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the states that wait."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.pending)

    def pending_states(self) -> Pair:
        """Return the states that wait, in one piece."""
        keys, values = (
            parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in zip(*self.pending, strict=True)
        )
        return keys, values

    def observe(self, query: torch.Tensor) -> None:
        """Take note of queries that attend to these keys, until the codec is chosen."""
        shape = self._shape
        batch, heads, _, key_dim = query.shape if query.dim() == 4 else (0, 0, 0, 0)
        fits = (batch, key_dim) == (shape.batch, shape.key_dim) and heads % shape.num_kv_heads == 0
        if not self.is_chosen and fits and query.shape[2]:
            self._choice.observe(query, shape.num_kv_heads)

    def choose(self, keys: JoinedStates, values: JoinedStates) -> None:
        """Choose the codec by all states that could be quantized now."""
        blocks = len(keys) // GRANULE
        picked = sorted({index * blocks // _SAMPLED_BLOCKS for index in range(_SAMPLED_BLOCKS)})
        sampled = [
            torch.cat([sequence[index * GRANULE : (index + 1) * GRANULE] for index in picked], dim=2)
            for sequence in (keys, values)
        ]
        self._choice.make(*sampled)
        self.fit()

    def fit(self) -> None:
        """Replace the empty segment of packed blocks by one for the codec, if their sizes differ."""
        if self._packed_shape != self.packed.shape:
            self.packed.close()
            self.packed = self._make_packed(self._packed_shape)

    def no_blocks(self, like: torch.Tensor) -> Pair:
        """Return packed blocks of no tokens on the device of a tensor."""
        keys, values = (
            like.new_empty((*heads, 0, size), dtype=torch.uint8)
            for *heads, size in (self.packed.shape.keys, self.packed.shape.values)
        )
        return keys, values

    def encode(self, keys: JoinedStates, values: JoinedStates, num_tokens: int) -> Pair:
        """
        Quantize the first tokens, whole blocks, on their device; nothing is stored.

        Raises:
            ValueError: there are no codes for some of them.
        """
        starts, packed = range(0, num_tokens, _QUANTIZED_AT_ONCE), []
        for codec, sequence in zip(self._codecs, (keys, values), strict=True):
            pieces = [codec.encode(sequence[at : min(at + _QUANTIZED_AT_ONCE, num_tokens)]) for at in starts]
            packed.append(torch.cat(pieces, dim=2))
        return packed[0], packed[1]

    def decode(self, packed: Pair, states: Pair) -> None:
        """Dequantize packed blocks into `states`, `[batch, num_kv_heads, blocks * 64, head_dim]`."""
        for codec, quantized, target in zip(self._codecs, packed, states, strict=True):
            codec.decode(quantized, target)

    def dequantized(self, first: int, last: int) -> Pair:
        """Dequantize the tokens of some blocks, on the device of the packed blocks; call `wait_for_copies` first."""
        keys, values = self.packed.read_range(first, last)
        shape = self._shape
        return (
            _decoded(self.codec.keys, keys, shape.key_dim, shape.key_dtype),
            _decoded(self.codec.values, values, shape.value_dim, shape.value_dtype),
        )

    def dequantized_keys(self, first: int, last: int) -> torch.Tensor:
        """Dequantize the keys of some blocks, like `dequantized`."""
        packed = self.packed.keys.read_range(first, last)
        return _decoded(self.codec.keys, packed, self._shape.key_dim, self._shape.key_dtype)

    def select(self, indices: torch.Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was."""
        self.packed.select(indices)
        self._shape = self._shape._replace(batch=len(indices))

    @property
    def _packed_shape(self) -> KVShape:
        """The shape of the packed blocks, seen as states themselves."""
        codec, shape = self._choice.codec, self._shape
        return shape._replace(
            key_dim=codec.keys.packed_bytes(shape.key_dim),
            value_dim=codec.values.packed_bytes(shape.value_dim),
            key_dtype=torch.uint8,
            value_dtype=torch.uint8,
        )

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        return self.codec.keys, self.codec.values


def _decoded(codec: Codec, packed: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    batch, heads, blocks, _ = packed.shape
    states = torch.empty(batch, heads, blocks * GRANULE, head_dim, dtype=dtype, device=packed.device)
    codec.decode(packed, states)
    return states
