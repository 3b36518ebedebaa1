"""One process's share of the keys and values of a layer of which most are coded."""

from collections.abc import Callable

import torch

from .buffered_store import BufferedStore
from .codec import CodecChoice
from .coded_store import CodedStore, coded_blocks
from .growth import GRANULE
from .host_store import HostStore
from .kv_store import KVShape, KVStore
from .scratch import Scratch
from .share import Share


class CodedShare(CodedStore):
    """
    Own blocks of a sequence, of which those are coded that one process would have coded.

    Until the codec is chosen every process keeps all tokens, so that all choose by the same ones.

    Args:
        shape: of the states.
        choice: how blocks are coded.
        full: for the tokens in full precision, the last ones after the first ones.
        make_records: makes the store for records of some shape, an entry for each block.
        scratch: where all states are put together for attention on the device.
        share: of this process.

    Attributes:
        share: what is kept now.
        sequence_tokens: of the whole sequence.
        sequence_blocks: coded ones of the whole sequence.
    """

    def __init__(
        self,
        shape: KVShape,
        choice: CodecChoice,
        full: BufferedStore,
        make_records: Callable[[KVShape], BufferedStore],
        scratch: Scratch,
        share: Share,
    ):
        super().__init__(shape, choice, full, make_records, scratch)
        self._own = share
        self.share = share if choice.is_made else Share.ALL
        self.sequence_tokens = self.sequence_blocks = 0

    @property
    def is_intact(self) -> bool:
        coded = self.records.num_tokens == self._own_coded(self.sequence_blocks)
        return super().is_intact and coded and self.num_tokens == self.share.tokens(self.sequence_tokens)

    @property
    def sink_tokens(self) -> int:
        return self.share.tokens(self.codec.sink_tokens)

    def extend_to(self, sequence_tokens: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new states of a sequence that is `sequence_tokens` long then: whole, not only the own ones."""
        self.take_held()
        before, self.sequence_tokens = self.sequence_tokens, sequence_tokens
        try:
            self.extend(self.share.part(keys, before), self.share.part(values, before))
        except BaseException:
            self.sequence_tokens = before
            raise
        self._note_coded()

    def truncate_to(self, sequence_tokens: int) -> None:
        """Keep what is among the first tokens of the sequence."""
        self.take_held()
        first = min(sequence_tokens, self.codec.sink_tokens)
        self.truncate(self.share.tokens(sequence_tokens))
        self.sequence_blocks = min(self.sequence_blocks, (sequence_tokens - first) // GRANULE)
        self.sequence_tokens = sequence_tokens

    def take_held(self) -> None:
        if not self.held_bytes:
            return
        if self.wants_queries:
            self._choose(*self._held_states())
            self._keep_own()
        super().take_held()
        self._note_coded()

    def take_from(self, other: KVStore) -> None:
        assert isinstance(other, CodedShare)
        other.take_held()
        self.share, self.sequence_tokens = other.share, other.sequence_tokens
        self.sequence_blocks = other.sequence_blocks
        super().take_from(other)

    def expect(self, sequence_tokens: int, sequence_blocks: int) -> None:
        """Make rows for the own ones of a sequence of so many tokens, of which so many blocks are coded."""
        assert isinstance(self.full, HostStore)
        assert isinstance(self.records, HostStore)
        coded = self._own_coded(sequence_blocks)
        self.full.make_rows(self.share.tokens(sequence_tokens) - coded * GRANULE)
        self.records.make_rows(coded)
        self.sequence_tokens, self.sequence_blocks = sequence_tokens, sequence_blocks
        self.take_parts({"full": self.full, "records": self.records})

    def _keep_own(self) -> None:
        """Give up what others keep, before anything is coded."""
        start, version = self.full.num_tokens, self.version
        with self._changing():
            keys, values = (self._own.part(states, 0) for states in self.full.read_range(0, start))
            self._held = (tuple(self._own.part(states, start) for states in self._held_states()),)  # type: ignore
            self.full.truncate(0)
            self.full.extend(keys, values)
            self.share = self._own
            self._set_length(self.share.tokens(self.sequence_tokens))
            self.version = version  # what `update` returned still stands for all of it

    def _blocks_to_code(self, new_tokens: int) -> int:
        due = max(self.sequence_blocks, coded_blocks(self.codec, self.sequence_tokens))
        return max(0, self._own_coded(due) - self.records.num_tokens)

    def _own_coded(self, blocks: int) -> int:
        """Own ones of the first coded blocks of the sequence."""
        first = self.codec.sink_tokens // GRANULE
        return self.share.blocks(first + blocks) - self.share.blocks(first)

    def _note_coded(self) -> None:
        if not self.held_bytes:
            self.sequence_blocks = max(self.sequence_blocks, coded_blocks(self.codec, self.sequence_tokens))
