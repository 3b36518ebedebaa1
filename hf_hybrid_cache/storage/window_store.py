"""The last keys and values of a layer whose queries see a window of tokens."""

from collections.abc import Iterable, Sequence

import torch

from .kv_shape import KVShape, Pair
from .layout import Layout
from .memory.growth import GRANULE
from .scratch import Scratch
from .segments import Segment, copy_entries
from .store import Runs, Store
from .token_store import TokenStore


class WindowStore(Store):
    """
    The last tokens of one layer, in full precision in one run; those before them are given back.

    A query sees itself and the `window - 1` tokens before it. At least a block more is kept, so that as many tokens can
    be removed again, and up to an eighth of the window: then the last ones move to the start of the run. Blocks are
    those of the sequence, so that attention has the same bits whatever was given back; the first may begin with zeros.

    Args:
        shape: of the states.
        window: tokens that a query sees, at least 2.
        runs: makes the run.
        scratch: see `Store`.

    Attributes:
        first: tokens of the sequence that were given back, or never came.
        keeps_all: give nothing back before tokens are removed, as assisted decoding asks for.
    """

    def __init__(self, shape: KVShape, window: int, runs: Runs, scratch: Scratch):
        super().__init__(shape, Layout(), runs, scratch)
        self.window = window
        self.first = self.num_hidden = 0
        self.keeps_all = False

    @staticmethod
    def most_tokens(window: int) -> int:
        """Return the most tokens that are kept unless `keeps_all`."""
        return window - 1 + GRANULE + max(GRANULE, window // 8)

    @property
    def is_intact(self) -> bool:
        is_whole = self._base + self.dense.num_entries == self.num_tokens
        return is_whole and not self._is_changing and self.dense.is_intact

    @property
    def _base(self) -> int:
        """The token of the sequence with which the run begins."""
        return self.first // GRANULE * GRANULE

    @property
    def num_shown(self) -> int:
        return self.dense.num_entries - self.num_hidden

    def hidden_from_next(self) -> int:
        return self.dense.num_entries - min(self.num_tokens, self.window - 1)

    def read(self) -> Pair:
        """Return the tokens that the newest ones attend to, on their device."""
        return self.dense.read(self.num_hidden)

    def read_copy(self) -> Pair:
        """Return the tokens that a query to come sees, contiguous, in memory that is not the store's."""
        keys, values = (each.contiguous().clone() for each in self.dense.read(self.hidden_from_next()))
        return keys, values

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        if self.num_tokens and keys.shape[2] <= GRANULE:
            self.write(keys, values)
            return self.read()
        shown = keys, values  # of which not all may be kept
        if self.num_tokens:
            before = self.dense.read(self.hidden_from_next())
            shown = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        self.write(keys, values)
        return shown

    def write(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        shown = min(self.num_tokens, self.window - 1) + keys.shape[2]
        if self._has_room(keys.shape[2]):
            super().write(keys, values)
        else:
            self._keep_last(keys, values)
        self.num_hidden = max(0, self.dense.num_entries - shown)

    def make_place(self) -> int:
        if self.is_intact and not self._has_room(1):
            self._keep_last(*self.dense.read_range(0, 0))
        # The number of blocks that queries see stays the same.
        return min(super().make_place(), GRANULE - self.hidden_from_next() % GRANULE)

    def _has_room(self, new_tokens: int) -> bool:
        return self.keeps_all or self.dense.num_entries + new_tokens <= self.most_tokens(self.window)

    def _keep_last(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new states, and keep no more tokens than needed."""
        before, held = self.num_tokens, self.dense.num_entries
        total = before + keys.shape[2]
        first = max(self.first, (total - self.window + 1 - GRANULE) // GRANULE * GRANULE)
        old = [each.clone() for each in self.dense.read_range(min(held, first - self._base), held)]
        skipped = max(0, first - before)
        self._renew(first, total, (old[0], old[1]), (keys[:, :, skipped:], values[:, :, skipped:]))

    def _renew(self, first: int, num_tokens: int, *states: Pair) -> None:
        """Make these states those of the tokens from `first` on, and forget all others."""
        missing = first % GRANULE
        self.dense.reserve(num_tokens - first + missing)
        filler = [each.new_zeros(*each.shape[:2], missing, each.shape[3]) for each in states[0]]
        with self._changing():
            self.dense.truncate(0)
            for keys, values in ((filler[0], filler[1]), *states):
                self.dense.write(keys, values)
            self.first = first
            self._set_length(num_tokens)
        self.num_hidden = self.hidden_from_next()

    def can_go_back_to(self, num_tokens: int) -> bool:
        """Return whether all that queries after the first `num_tokens` see is still there."""
        return not num_tokens or self.first <= max(0, num_tokens - self.window + 1)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`, to which the store `can_go_back_to`, and give back what they do not need."""
        with self._changing():
            if not num_tokens:
                self.first = 0
            self.dense.truncate(num_tokens - self._base)
            self._set_length(num_tokens)
        if self.dense.num_entries > self.most_tokens(self.window):
            self._keep_last(*self.dense.read_range(0, 0))
        self.num_hidden = self.hidden_from_next()

    def put(self, num_tokens: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make these states the last ones of `num_tokens`, and forget all others."""
        self._renew(num_tokens - keys.shape[2], num_tokens, (keys, values))

    def take_from(self, other: TokenStore) -> None:
        assert isinstance(other, WindowStore)
        copy_entries([Segment(other.dense, 0, other.dense.num_entries)], self.dense)
        self.first = other.first
        self._set_length(other.num_tokens)
        self.num_hidden = self.hidden_from_next()

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        yield from self.dense.planned_bytes([min(each, self.most_tokens(self.window)) for each in lengths])
