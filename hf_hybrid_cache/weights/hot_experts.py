"""Hot experts of a layer, those that most tokens have chosen so far: copies of them stay on the device."""

import warnings

import torch

# Number of tokens after which the hot experts are chosen again.
MOVED_EVERY = 256


class HotExperts:
    """
    Counts how often each expert is chosen, and keeps copies of the hot experts on the device.

    Args:
        room: number of experts on the device.

    Attributes:
        room: number of experts on the device; 0 once the device has had no memory for them.
    """

    def __init__(self, room: int):
        self.room = room
        self._counts: torch.Tensor | None = None
        self._tokens_since = 0
        self._places: dict[int, int] = {}
        self._up = self._down = torch.empty(0)

    def note(self, counts: torch.Tensor, num_tokens: int) -> bool:
        """
        Count the choices of a step.

        Args:
            counts: int64 `[experts]` in host memory, the number of tokens that have chosen each expert.
            num_tokens: number of tokens of the step.

        Returns:
            Whether the hot experts are to be chosen again.
        """
        self._counts = counts.clone() if self._counts is None else self._counts + counts
        self._tokens_since += num_tokens
        is_time = self._tokens_since >= MOVED_EVERY or not self._places
        if is_time:
            self._tokens_since = 0
        return is_time

    def wanted(self) -> list[int]:
        """Indices of hot experts that are not on the device yet, the hottest first."""
        best = self._best()
        return [index for index in best if index not in self._places]

    def keep(self, index: int, up: torch.Tensor, down: torch.Tensor) -> None:
        """Keep a copy of a wanted expert, whose weights are on the device, in place of one that is not hot any more."""
        if not self._has_memory(up, down):
            return
        if len(self._places) < self.room:
            place = len(self._places)
        else:
            best = set(self._best())
            place = self._places.pop(next(held for held in self._places if held not in best))
        self._up[place].copy_(up)
        self._down[place].copy_(down)
        self._places[index] = place

    def held(self, device: torch.device) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The experts on the device by index, with the weights of both products."""
        if self._up.device != device:
            self._places.clear()
        return {index: (self._up[place], self._down[place]) for index, place in self._places.items()}

    def _best(self) -> list[int]:
        assert self._counts is not None
        chosen = self._counts.argsort(descending=True, stable=True)[: self.room]
        return [index for index in chosen.tolist() if self._counts[index] > 0]

    def _has_memory(self, up: torch.Tensor, down: torch.Tensor) -> bool:
        if self.room and (self._up.device != up.device or self._up.dtype != up.dtype):
            self._places.clear()
            try:
                self._up, self._down = (each.new_empty(self.room, *each.shape) for each in (up, down))
            except torch.OutOfMemoryError:
                warnings.warn(
                    f"{up.device} has no room for {self.room} experts of each layer "
                    f"({self.room * (up.nbytes + down.nbytes) / 2**20:,.0f} MiB for this one). They are computed on "
                    "the CPU. Use move_experts_to_host with fewer device_experts.",
                    stacklevel=2,
                )
                self.room, self._up, self._down = 0, torch.empty(0), torch.empty(0)
        return self.room > 0
