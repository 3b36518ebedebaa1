"""The checkpoints of a cache, and the lengths that it can go back to."""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from ...layers import HybridLayer, NoCheckpointError, can_be_cropped
from ...saving import Checkpoint


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
