"""Keys and values that a caller has read from a layer, and the caller's edits of them."""

import weakref
from typing import Protocol

import torch


class _Lent:
    """
    A tensor that a caller may write to.

    Its views share its version counter, so a write to a slice counts, even if the slice is gone by now.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor: torch.Tensor | None = tensor
        self._reference = weakref.ref(tensor)
        with torch.inference_mode(False):
            counter = tensor.detach()
            counter.data = tensor.new_empty(0)  # it keeps the counter, and no memory
        self._counter = counter
        self.forget_edits()

    @property
    def is_edited(self) -> bool:
        return self._counter._version != self._seen_version

    @property
    def tensor(self) -> torch.Tensor | None:
        return self._reference() if self._tensor is None else self._tensor

    @property
    def held_bytes(self) -> int:
        return 0 if self._tensor is None else self._tensor.nbytes

    def forget_edits(self) -> None:
        self._seen_version = self._counter._version

    def let_go(self) -> None:
        self._tensor = None


class LentStates:
    """
    Keys and values of a layer as a caller has them, and states that were assigned instead.

    Args:
        states: keys and values that were read, in memory of their own; `None` for those of an empty layer.
    """

    def __init__(self, states: tuple[torch.Tensor, torch.Tensor] | None):
        self._lent = [] if states is None else [_Lent(each) for each in states]
        self._assigned: dict[int, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict) -> None:
        """Return `None`, because a copy of the layer has lent nothing."""

    @property
    def is_edited(self) -> bool:
        """Whether the caller has written to them, or assigned others."""
        return bool(self._assigned) or any(each.is_edited for each in self._lent)

    @property
    def held_bytes(self) -> int:
        """Bytes that are kept for the caller."""
        return sum(each.held_bytes for each in self._lent)

    @property
    def assigned_tokens(self) -> int | None:
        """Number of tokens of the assigned keys, else of the assigned values; `None` if there are neither."""
        for states in sorted(self._assigned.items()):
            return states[1].shape[-2]
        return None

    def assign(self, role: int, states: torch.Tensor) -> None:
        """Assign other keys (0) or values (1)."""
        self._assigned[role] = states

    def get(self, role: int) -> torch.Tensor | None:
        """Return the keys (0) or the values (1); `None` if there are none, or nobody has kept them."""
        if role in self._assigned:
            return self._assigned[role]
        return self._lent[role].tensor if self._lent else None

    def edited(self, role: int, stored: torch.Tensor | None) -> torch.Tensor | None:
        """
        Return the keys (0) or the values (1) with the caller's edits; `None` if they are gone.

        Args:
            role: 0 or 1.
            stored: states that the layer has.
        """
        if role in self._assigned:
            return self._assigned[role]
        return self._lent[role].tensor if self._lent and self._lent[role].is_edited else stored

    def forget_edits(self) -> None:
        """Note that the layer has stored the edits."""
        for each in self._lent:
            each.forget_edits()

    def let_go(self) -> None:
        """Keep no memory for the caller any longer; writes to tensors that the caller keeps still count as edits."""
        for each in self._lent:
            each.let_go()


class LendingLayer(Protocol):
    """Interface of a layer that `RecentlyLent` uses."""

    @property
    def is_lending(self) -> bool: ...
    @property
    def lent_bytes(self) -> int: ...
    def let_lent_go(self) -> None: ...
    def take_edits(self) -> None: ...


class RecentlyLent:
    """
    The layers of a cache that were read since tokens came.

    They keep their lent states, because the edited tensor may be gone before the layer is used. All layers together
    would keep the whole cache once more, so only those that were read last do.

    Args:
        most_bytes: most bytes that are kept, beside those of the layer that was read last.
    """

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._layers: list[weakref.ref[LendingLayer]] = []

    def __deepcopy__(self, memo: dict) -> "RecentlyLent":
        return RecentlyLent(self._most_bytes)

    def note(self, layer: LendingLayer) -> None:
        """Note that a layer has lent its states, and let the layers that did so longest ago store the edits."""
        others = [each for each in self._lending() if each is not layer]
        held = [each for each in others if each.lent_bytes]
        while held and sum(each.lent_bytes for each in held) > self._most_bytes:
            held.pop(0).let_lent_go()
        self._layers = [weakref.ref(each) for each in (*others, layer)]

    def take_edits(self) -> None:
        """Let all layers store the edits of callers, before a forward pass changes the first one."""
        if self._layers:
            for layer in self._lending():
                layer.take_edits()
            self._layers = []

    def _lending(self) -> list[LendingLayer]:
        layers = (reference() for reference in self._layers)
        return [layer for layer in layers if layer is not None and layer.is_lending]
