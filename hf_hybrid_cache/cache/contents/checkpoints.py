"""The checkpoints of a cache, and the lengths that it can go back to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import torch

from ...layers import (
    HybridLayer,
    NoCheckpointError,
    can_be_cropped,
    copy_of,
    num_sequences_of,
    put_back,
    select_sequences_of,
    tensors_of,
)
from ...storage import RecentStates


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
        """Make layers what they were; the checkpoint can be put back again."""
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
        return replace(self, stock=stock, recent=recent, batch=batch, sequences=torch.arange(batch))


class Checkpoints:
    """
    Checkpoints by their lengths, and what layers need them for.

    Args:
        layers: of the cache.
    """

    def __init__(self, layers: list[Any]):
        self._layers = layers
        self._by_length: dict[int, Checkpoint] = {}

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths, in order."""
        return tuple(sorted(self._by_length))

    def take(self, num_tokens: int) -> None:
        """Take a checkpoint of the layers, which hold `num_tokens`; it replaces one of the same length."""
        self._by_length[num_tokens] = Checkpoint.of(self._layers, num_tokens)

    def last(self, num_tokens: int) -> Checkpoint | None:
        """Return the last checkpoint at or before a length; `None` if there is none."""
        length = max((each for each in self._by_length if each <= num_tokens), default=None)
        return None if length is None else self._by_length[length]

    def at(self, num_tokens: int) -> Checkpoint | None:
        """Return the checkpoint of a length; `None` if there is none."""
        return self._by_length.get(num_tokens)

    def drop(self, num_tokens: int) -> None:
        """Drop the checkpoint of a length, if there is one."""
        self._by_length.pop(num_tokens, None)

    def drop_after(self, num_tokens: int) -> None:
        """Drop the checkpoints of longer lengths, after which other tokens may come."""
        self._by_length = {length: each for length, each in self._by_length.items() if length <= num_tokens}

    def select(self, indices: torch.Tensor) -> None:
        """Follow a selection of sequences."""
        for each in self._by_length.values():
            each.select(indices)

    def repeat(self, repeats: int) -> None:
        """Follow a repetition of each sequence."""
        for each in self._by_length.values():
            each.repeat(repeats)

    def stock_layers(self) -> Iterator[Any]:
        """Yield the copies of transformers' own layers."""
        for each in self._by_length.values():
            yield from each.stock.values()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that the checkpoints hold in memory."""
        for each in tuple(self._by_length.values()):
            yield from each.tensors()

    def can_crop(self, left: int, num_tokens: int) -> bool:
        """Whether all layers can go back from `num_tokens` to those that are left without a checkpoint."""
        return not self._in_the_way(left, num_tokens)

    def refuse(self, left: int, num_tokens: int) -> NoReturn:
        """Raise a `NoCheckpointError`: layers cannot go back from `num_tokens` to those that were to be left."""
        kinds = ", ".join(sorted({type(layer).__name__ for layer in self._in_the_way(left, num_tokens)}))
        lengths = ", ".join(f"{length:,}" for length in self.lengths) or "none"
        raise NoCheckpointError(
            f"The cache cannot go back by {num_tokens - left:,} tokens to {left:,}: layers of type {kinds} no longer "
            f"hold what they held there. Checkpoints are at: {lengths}. cache.checkpoint() keeps these states at a "
            "length, cache.go_back(n) goes to the last checkpoint at or before n, and cache.reset() forgets all."
        )

    def _in_the_way(self, left: int, num_tokens: int) -> list[Any]:
        """Return the layers that cannot go back."""
        theirs = (layer for layer in self._layers if not isinstance(layer, HybridLayer))
        return [layer for layer in theirs if not can_be_cropped(layer, num_tokens - left, num_tokens)]
