"""The methods of caches that change which sequences they hold."""

from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicCache

from ...layers import repeat_sequences_of, select_sequences_of
from ..checks.prompts import Prompts
from ..contents.contents import Contents
from ..contents.memory import require_room_for_copies


class ChangingSequences(DynamicCache):
    """The part of `HybridCache` that selects and repeats sequences."""

    _contents: Contents
    _prompts: Prompts

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """
        Make sequence `i` what sequence `beam_idx[i]` was.

        Raises:
            IndexError: there are fewer sequences; nothing has changed then.
        """
        if beam_idx.device.type == "cpu":  # elsewhere the check would wait for the device
            self._require(lambda sequences: sequences.index_select(0, beam_idx))
        self._prompts.note_reordered()
        with self._contents.changing("reorder_cache"):
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
            self._contents.checkpoints.select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """
        Keep the sequences that `indices` (integers or a boolean mask) selects, in that order.

        Raises:
            IndexError: there are fewer sequences, or it is neither; nothing has changed then.
        """
        self._require(lambda sequences: sequences[torch.as_tensor(indices, device="cpu")])
        selected = self._prompts.selected(indices)
        self._prompts.token_ids = None  # something may end it half-way
        with self._contents.changing("batch_select_indices"):
            for layer in self._contents.ours:
                layer.batch_select_indices(indices)
            for layer in self._contents.theirs:
                select_sequences_of(layer, indices)
            self._contents.checkpoints.select(indices)
        self._prompts.token_ids = selected

    def batch_repeat_interleave(self, repeats: int) -> None:
        """
        Repeat every sequence `repeats` times, side by side.

        Where layers are attended to on the CPU, or are in full precision, the copies share all whole blocks of 64
        tokens: these are stored once, and a decode step reads them once. docs/continuations.md says what is copied.

        Raises:
            HostMemoryError: host memory would not suffice; nothing has changed then.
            ValueError: `repeats` is negative.
        """
        if repeats < 0:
            raise ValueError(f"Sequences cannot be repeated {repeats} times: pass a number of at least 0.")
        if repeats > 1:
            copied = f"{repeats} copies of {self._contents.num_tokens:,} tokens need"
            require_room_for_copies(self._contents, repeats, copied, are_shared=True)
        with self._contents.changing("batch_repeat_interleave"):
            for layer in self._contents.ours:
                layer.batch_repeat_interleave(repeats)
            for layer in self._contents.theirs:
                repeat_sequences_of(layer, repeats)
            self._contents.checkpoints.repeat(repeats)
        self._prompts.repeat(repeats)

    def _require(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let a choice of sequences be refused before it changes the first layers."""
        self._contents.require_whole()
        held = self._contents.num_sequences
        if held is not None:
            choose(torch.arange(held))
