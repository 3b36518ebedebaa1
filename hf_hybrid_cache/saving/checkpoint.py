"""The small states of all layers of a cache at one length, with which it can go back to that length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from ..layers import HybridLayer, copy_of, num_sequences_of, put_back, select_sequences_of, tensors_of
from ..storage import RecentStates


@dataclass
class Checkpoint:
    """
    All that later tokens would change: states of transformers' own layers, and recent tokens of quantized ones.

    Of layers in full precision it has the number of tokens alone. It is put back into layers that hold at least as many
    tokens, the first of which are those of before.

    Attributes:
        num_tokens: of each sequence.
        stock: copies of transformers' own layers, by index.
        lengths: tokens of the other layers, by index.
        recent: states of those that are quantized, by index.
        batch: sequences of these states.
        sequences: which of them each sequence of the cache continues.
    """

    num_tokens: int
    stock: dict[int, Any]
    lengths: dict[int, int]
    recent: dict[int, RecentStates]
    batch: int
    sequences: torch.Tensor

    @classmethod
    def of(cls, layers: Sequence[Any], num_tokens: int) -> Self:
        """Copy the small states of layers; `num_tokens` is the length of the cache."""
        ours = {index: layer for index, layer in enumerate(layers) if isinstance(layer, HybridLayer)}
        recent = {index: states for index, layer in ours.items() if (states := layer.recent_states()) is not None}
        stock = {index: copy_of(layer) for index, layer in enumerate(layers) if index not in ours}
        held = (layer.batch if index in ours else num_sequences_of(layer) for index, layer in enumerate(layers))
        batch = next(filter(None, held), 1)
        lengths = {index: layer.get_seq_length() for index, layer in ours.items()}
        return cls(num_tokens, stock, lengths, recent, batch, torch.arange(batch))

    def put_back(self, layers: Sequence[Any]) -> None:
        """
        Make layers what they were; the checkpoint can be put back again.

        Raises:
            HostMemoryError: host memory would not suffice for what one of them needs.
        """
        twin = self._of_its_sequences()
        for index, num_tokens in twin.lengths.items():
            layers[index].go_back(num_tokens, twin.recent.get(index))
        for index, layer in twin.stock.items():
            put_back(layers[index], layer)

    def select(self, indices: torch.Tensor) -> None:
        """Follow a selection of sequences, integers or a boolean mask; states are selected when they are put back."""
        self.sequences = self.sequences[torch.as_tensor(indices, device="cpu")]

    def repeat(self, repeats: int) -> None:
        """Follow a repetition of each sequence, side by side."""
        self.sequences = self.sequences.repeat_interleave(repeats)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that the checkpoint holds in memory."""
        for layer in self.stock.values():
            yield from tensors_of(layer)
        for recent in self.recent.values():
            yield from recent.states

    def _of_its_sequences(self) -> "Checkpoint":
        """Return a copy whose states are those of the sequences of the cache; recent ones may be the same tensors."""
        stock, recent = {index: copy_of(layer) for index, layer in self.stock.items()}, self.recent
        if not torch.equal(self.sequences, torch.arange(self.batch)):
            for layer in stock.values():
                select_sequences_of(layer, self.sequences)
            recent = {index: each.of_sequences(self.sequences) for index, each in recent.items()}
        batch = len(self.sequences)
        return Checkpoint(self.num_tokens, stock, self.lengths, recent, batch, torch.arange(batch))
