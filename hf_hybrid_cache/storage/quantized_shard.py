"""One process's share of the keys and values of a layer of which most are quantized."""

from collections.abc import Callable

import torch

from .buffered_store import BufferedStore
from .codec import CodecChoice
from .growth import GRANULE
from .host_store import HostStore
from .kv_store import KVShape, KVStore
from .quantized_store import QuantizedStore, num_quantized_blocks
from .scratch import Scratch
from .shard import Shard


class QuantizedShard(QuantizedStore):
    """
    Own blocks of a sequence, of which those are quantized that one process would have quantized.

    Until the codec is chosen every process keeps all tokens, so that all choose by the same ones.

    Args:
        shape: of the states.
        choice: how blocks are quantized.
        full: for the tokens in full precision, the last ones after the first ones.
        make_packed: makes the store for packed blocks of some shape, an entry for each block.
        scratch: where all states are put together for attention on the device.
        shard: of this process.

    Attributes:
        shard: what is kept now.
        sequence_tokens: of the whole sequence.
        sequence_blocks: quantized ones of the whole sequence.
    """

    def __init__(
        self,
        shape: KVShape,
        choice: CodecChoice,
        full: BufferedStore,
        make_packed: Callable[[KVShape], BufferedStore],
        scratch: Scratch,
        shard: Shard,
    ):
        super().__init__(shape, choice, full, make_packed, scratch)
        self._own = shard
        self.shard = shard if choice.is_made else Shard.ALL
        self.sequence_tokens = self.sequence_blocks = 0

    @property
    def is_intact(self) -> bool:
        quantized = self.packed.num_tokens == self._own_quantized(self.sequence_blocks)
        return super().is_intact and quantized and self.num_tokens == self.shard.tokens(self.sequence_tokens)

    @property
    def sink_tokens(self) -> int:
        return self.shard.tokens(self.codec.sink_tokens)

    def extend_to(self, sequence_tokens: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new states of a sequence that is `sequence_tokens` long then: whole, not only the own ones."""
        self.take_pending()
        before, self.sequence_tokens = self.sequence_tokens, sequence_tokens
        try:
            self.extend(self.shard.part(keys, before), self.shard.part(values, before))
        except BaseException:
            self.sequence_tokens = before
            raise
        self._note_quantized()

    def truncate_to(self, sequence_tokens: int) -> None:
        """Keep what is among the first tokens of the sequence."""
        self.take_pending()
        first = min(sequence_tokens, self.codec.sink_tokens)
        self.truncate(self.shard.tokens(sequence_tokens))
        self.sequence_blocks = min(self.sequence_blocks, (sequence_tokens - first) // GRANULE)
        self.sequence_tokens = sequence_tokens

    def take_pending(self) -> None:
        if not self.held_bytes:
            return
        if self.wants_queries:
            self._choose(*self._pending_states())
            self._keep_own()
        super().take_pending()
        self._note_quantized()

    def take_from(self, other: KVStore) -> None:
        assert isinstance(other, QuantizedShard)
        other.take_pending()
        self.shard, self.sequence_tokens = other.shard, other.sequence_tokens
        self.sequence_blocks = other.sequence_blocks
        super().take_from(other)

    def expect(self, sequence_tokens: int, sequence_blocks: int) -> None:
        """Make rows for the own ones of a sequence of so many tokens, of which so many blocks are quantized."""
        assert isinstance(self.full, HostStore)
        assert isinstance(self.packed, HostStore)
        quantized = self._own_quantized(sequence_blocks)
        self.full.make_rows(self.shard.tokens(sequence_tokens) - quantized * GRANULE)
        self.packed.make_rows(quantized)
        self.sequence_tokens, self.sequence_blocks = sequence_tokens, sequence_blocks
        self.take_parts({"full": self.full, "packed": self.packed})

    def _keep_own(self) -> None:
        """Give up what others keep, before anything is quantized."""
        start, version = self.full.num_tokens, self.version
        with self._changing():
            keys, values = (self._own.part(states, 0) for states in self.full.read_range(0, start))
            self._pending = (tuple(self._own.part(states, start) for states in self._pending_states()),)  # type: ignore
            self.full.truncate(0)
            self.full.extend(keys, values)
            self.shard = self._own
            self._set_length(self.shard.tokens(self.sequence_tokens))
            self.version = version  # what `update` returned still stands for all of it

    def _blocks_to_quantize(self, new_tokens: int) -> int:
        due = max(self.sequence_blocks, num_quantized_blocks(self.codec, self.sequence_tokens))
        return max(0, self._own_quantized(due) - self.packed.num_tokens)

    def _own_quantized(self, blocks: int) -> int:
        """Own ones of the first quantized blocks of the sequence."""
        first = self.codec.sink_tokens // GRANULE
        return self.shard.blocks(first + blocks) - self.shard.blocks(first)

    def _note_quantized(self) -> None:
        if not self.held_bytes:
            self.sequence_blocks = max(self.sequence_blocks, num_quantized_blocks(self.codec, self.sequence_tokens))
