"""The shard that one process keeps of a quantized layer."""

from dataclasses import replace

import torch

from .growth import GRANULE
from .host_store import HostStore
from .kv_store import KVStore
from .layout import Layout
from .quantized_store import QuantizedStore


class QuantizedShard(QuantizedStore):
    """
    The shard of a quantized layer. It quantizes the same blocks of a sequence as a single process would.

    Until the codec is chosen every process keeps all tokens, so that all choose by the same states.

    Arguments are those of `QuantizedStore`.

    Attributes:
        layout: layout of the whole sequence, with the blocks that this process keeps now.
        sequence_tokens: number of tokens of the whole sequence.
    """

    full: HostStore
    packed: HostStore
    sequence_tokens = 0

    @property
    def is_intact(self) -> bool:
        return super().is_intact and self.num_tokens == self.layout.shard.tokens(self.sequence_tokens)

    def extend_to(self, sequence_tokens: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store this shard's part of all new states; the sequence then has `sequence_tokens`."""
        self.take_pending()
        before, self.sequence_tokens = self.sequence_tokens, sequence_tokens
        try:
            self.extend(self.layout.shard.part(keys, before), self.layout.shard.part(values, before))
        except BaseException:
            self.sequence_tokens = before
            raise

    def truncate_to(self, sequence_tokens: int) -> None:
        """Keep this shard's part of the first `sequence_tokens`."""
        self.take_pending()
        self._truncate(self.layout.shard.tokens(sequence_tokens), self.layout.cropped(sequence_tokens))
        self.sequence_tokens = sequence_tokens

    def take_pending(self) -> None:
        if not self.held_bytes:
            return
        if self.wants_queries:
            self._choose(*self._pending_states())
            self._keep_own()
        super().take_pending()

    def take_from(self, other: KVStore) -> None:
        assert isinstance(other, QuantizedShard)
        other.take_pending()
        super().take_from(other)
        self.layout, self.sequence_tokens = other.layout, other.sequence_tokens

    def expect(self, sequence_tokens: int, quantized_blocks: int) -> None:
        """Make rows for this shard's part of so many tokens, of which so many blocks are quantized."""
        layout = replace(self.layout, quantized_blocks=quantized_blocks)
        self.full.make_rows(layout.shard.tokens(sequence_tokens) - layout.own_quantized_blocks * GRANULE)
        self.packed.make_rows(layout.own_quantized_blocks)
        self.take_parts({"full": self.full, "packed": self.packed})
        self.layout, self.sequence_tokens = layout, sequence_tokens

    def _keep_own(self) -> None:
        """Drop the tokens of other shards, before anything is quantized."""
        start, version = self.full.num_tokens, self.version
        with self._changing():
            keys, values = (self._own.part(states, 0) for states in self.full.read_range(0, start))
            self._pending = (tuple(self._own.part(states, start) for states in self._pending_states()),)  # type: ignore
            self.full.truncate(0)
            self.full.extend(keys, values)
            self.layout = replace(self.layout, shard=self._own)
            self._set_length(self._own.tokens(self.sequence_tokens))
            self.version = version  # handles still stand for the whole layer

    def _layout_with(self, new_tokens: int) -> Layout:
        return self.layout.after(self.sequence_tokens)
