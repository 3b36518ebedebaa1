"""Checkpoints of the layers of a cache, and layers that cannot go back without one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..layers import HybridLayer, WindowLayer, copy_of, num_sequences_of, tensors_of
from ..storage import RecentStates


@dataclass
class Checkpoint:
    """
    All that later tokens would change: states of transformers' own layers, and recent tokens of quantized ones.

    Of layers in full precision it has the number of tokens alone. It is put back into layers that hold at least as many
    tokens, the first of which are those of before.

    Attributes:
        stock: copies of transformers' own layers, by index.
        lengths: tokens of the other layers, by index.
        recent: states of those that are quantized, by index.
        batch: sequences of these states.
        sequences: which of them each sequence of the cache continues; states are selected when they are put back.
    """

    stock: dict[int, Any]
    lengths: dict[int, int]
    recent: dict[int, RecentStates]
    batch: int
    sequences: torch.Tensor

    @classmethod
    def of(cls, layers: Sequence[Any]) -> Self:
        """Copy the small states of layers."""
        ours = {index: layer for index, layer in enumerate(layers) if isinstance(layer, HybridLayer)}
        recent = {index: states for index, layer in ours.items() if (states := layer.recent_states()) is not None}
        stock = {index: copy_of(layer) for index, layer in enumerate(layers) if index not in ours}
        lengths = {index: layer.get_seq_length() for index, layer in ours.items()}
        batch = num_sequences(layers) or 1
        return cls(stock, lengths, recent, batch, torch.arange(batch))

    def put_back(self, layers: Sequence[Any]) -> None:
        """Make layers what they were; the checkpoint can be put back again."""
        stock, recent = {index: copy_of(layer) for index, layer in self.stock.items()}, self.recent
        if not torch.equal(self.sequences, torch.arange(self.batch)):
            for layer in stock.values():
                if num_sequences_of(layer) is not None:
                    layer.reorder_cache(self.sequences)
            recent = {index: each.of_sequences(self.sequences) for index, each in recent.items()}
        for index, num_tokens in self.lengths.items():
            layers[index].go_back(num_tokens, recent.get(index))
        for index, layer in stock.items():
            if hasattr(layer, "record_past"):  # assisted decoding may have begun, or ended, since
                layer.record_past |= layers[index].record_past
            layers[index].__dict__ = vars(layer)  # at once, so that no interruption leaves a half of it

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that the checkpoint holds in memory."""
        for layer in self.stock.values():
            yield from tensors_of(layer)
        for recent in self.recent.values():
            yield from recent.states


def num_sequences(layers: Sequence[Any]) -> int | None:
    """Return the number of sequences that layers hold; `None` if they hold none."""
    held = (layer.batch if isinstance(layer, HybridLayer) else num_sequences_of(layer) for layer in layers)
    return next((number for number in held if number is not None), None)


def kinds_in_the_way(layers: Sequence[Any], left: int, held: int) -> list[str]:
    """Return the types of the layers that cannot go back from `held` tokens to those that are left."""
    return sorted({type(layer).__name__ for layer in layers if not _can_be_cropped(layer, held - left, held)})


def kinds_that_stay(layers: Sequence[Any]) -> list[str]:
    """Return the types of the layers that can take no token back, even if they record the past before it comes."""
    stock = (layer for layer in layers if not isinstance(layer, HybridLayer))
    return sorted({type(layer).__name__ for layer in stock if not _is_croppable(layer) or _forgets(layer)})


def _is_croppable(layer: Any) -> bool:
    """Return whether a layer of transformers' own goes back to what it was, as far as it has not forgotten that."""
    # transformers does not tell: some types raise an error, and some go on with states that are not those of before.
    kinds = type(layer).__mro__
    storing, cropping = (
        next((each for each in kinds if method in vars(each)), object) for method in ("update", "crop")
    )
    if storing is not cropping and issubclass(storing, cropping):
        return False  # it stores more than what it inherits to be cropped
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return all(states is None for states in layer.recurrent_states.values())
    return bool(layer.is_croppable)


def _forgets(layer: Any) -> bool:
    """Return whether a layer drops states, and cannot be told to wait with it; before 5.23 none can."""
    drops = isinstance(layer, LinearAttentionCacheLayerMixin) or getattr(layer, "is_sliding", False)
    return drops and not hasattr(layer, "record_past")


def _can_be_cropped(layer: Any, tokens_to_remove: int, num_tokens: int) -> bool:
    """Return whether a layer can go back to what it was so many tokens ago, of `num_tokens`."""
    if isinstance(layer, HybridLayer):
        return not isinstance(layer, WindowLayer) or layer.can_go_back_to(num_tokens - tokens_to_remove)
    records_past = getattr(layer, "record_past", False)

    def holds(states: torch.Tensor, dim: int, needed: int) -> bool:
        held = states.shape[dim]
        return records_past and held >= min(num_tokens, needed + tokens_to_remove)

    if not _is_croppable(layer):
        return False
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for index, states in layer.conv_states.items():
            if states is not None and not holds(states, -1, layer.conv_kernel_size[index] or 0):
                return False
    is_full = getattr(layer, "is_sliding", False) and layer.get_seq_length() >= layer.sliding_window
    return not is_full or holds(layer.keys, 2, layer.sliding_window - 1)
