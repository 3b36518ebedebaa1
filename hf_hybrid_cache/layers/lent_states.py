"""Keys and values that callers have read from layers, and the callers' edits of them."""

import weakref
from typing import Any

import torch

from ..storage import Pair, StorageUses


class LentStates:
    """
    Keys and values of a layer as a caller has them, and states that were assigned instead.

    The caller gets tensors that share memory and version counter with those here, as slices of them do. So the counter
    tells of writes in place, and torch whether the caller still has any of them.

    Args:
        states: keys and values that were read, in memory of their own; `None` for those of an empty layer.
    """

    def __init__(self, states: Pair | None):
        self._read = () if states is None else states
        self._uses = [StorageUses(each) for each in self._read]
        self._assigned: dict[int, torch.Tensor] = {}
        self.forget_edits()

    def __deepcopy__(self, memo: dict) -> None:
        """Return `None`, because a copy of the layer has lent nothing."""

    def get(self, role: int) -> torch.Tensor | None:
        """Return the keys (0) or the values (1) with the caller's edits; `None` if there are none."""
        if role in self._assigned or not self._read:
            return self._assigned.get(role)
        return self._read[role].detach()

    def assign(self, role: int, states: torch.Tensor) -> None:
        """Assign other keys (0) or values (1)."""
        self._assigned[role] = states

    @property
    def is_held(self) -> bool:
        """Whether the caller still has a tensor that was read, or a slice of one."""
        return any(each.is_shared for each in self._uses)

    @property
    def is_edited(self) -> bool:
        """Whether the caller has written to them, or assigned others."""
        return bool(self._assigned) or [each._version for each in self._read] != self._stored_versions

    @property
    def fit(self) -> bool:
        """Whether keys and values fit each other; others may still be assigned where they do not."""
        keys, values = self.get(0), self.get(1)
        if keys is None or values is None or keys.shape[:3] != values.shape[:3]:
            return False
        return (keys.device, keys.dtype) == (values.device, values.dtype)

    @property
    def assigned_tokens(self) -> int | None:
        """Number of tokens of the assigned keys, else of the assigned values; `None` if there are neither."""
        assigned = self._assigned.get(0, self._assigned.get(1))
        return None if assigned is None else assigned.shape[-2]

    def forget_edits(self) -> None:
        """Note that the layer has stored what was written."""
        self._stored_versions = [each._version for each in self._read]


class LendingLayers:
    """
    The layers of a cache that callers have read from, or assigned to, since tokens came.

    What was read is kept, because the caller's tensor may be gone before its edits are stored. All layers together
    would keep the whole cache once more, so only the last one does, and those of which the caller has something.
    """

    def __init__(self) -> None:
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()

    def note(self, layer: Any) -> None:
        """Note that a layer is about to lend its states, and let the others store edits and keep no memory."""
        for other in tuple(self._layers):
            other.let_lent_go()
        self._layers.add(layer)

    def take_edits(self) -> None:
        """Let all layers store the edits of callers, before a forward pass changes the first one."""
        if self._layers:
            for layer in tuple(self._layers):
                layer.take_edits()
            self._layers.clear()
