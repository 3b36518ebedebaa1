"""The experts of a layer that most tokens have chosen so far: copies of them stay on the device."""

import warnings

import torch

# Tokens between two looks at which experts are the most popular.
MOVED_EVERY = 256


class PopularExperts:
    """
    Counts what tokens choose, and keeps copies of what most of them have chosen.

    Args:
        room: for so many experts.

    Attributes:
        room: likewise; 0 once the device has refused it.
    """

    def __init__(self, room: int):
        self.room = room
        self._counts: torch.Tensor | None = None
        self._tokens_since = 0
        self._places: dict[int, int] = {}
        self._up = self._down = torch.empty(0)

    def note(self, counts: torch.Tensor, num_tokens: int) -> bool:
        """
        Count choices.

        Args:
            counts: int64 `[experts]` in host memory, how many of the tokens have chosen each.
            num_tokens: of which these are.

        Returns:
            Whether it is time to look which are the most popular.
        """
        self._counts = counts.clone() if self._counts is None else self._counts + counts
        self._tokens_since += num_tokens
        is_time = self._tokens_since >= MOVED_EVERY or not self._places
        if is_time:
            self._tokens_since = 0
        return is_time

    def wanted(self) -> list[int]:
        """The most popular experts that are not here, as many as there is room for beside those that are to stay."""
        best = self._best()
        return [index for index in best if index not in self._places]

    def keep(self, index: int, up: torch.Tensor, down: torch.Tensor) -> None:
        """Copy the weights of a wanted expert, which are on the device; one that is popular no more makes room."""
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
        """Experts on the device, with the weights of both products."""
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
