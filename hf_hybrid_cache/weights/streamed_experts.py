"""
Experts in host memory for a model on an accelerator.

With few tokens, the CPU multiplies the chosen experts, and only activations cross the bus. An expert that many tokens
of a prompt have chosen is copied to the device once, the next one while this one computes.
"""

from collections.abc import Iterator, Sequence

import torch

from ..storage import Issued, Streams, can_page_lock, streams_for
from .expert_layers import ExpertLayer

# Calculated: with so many tokens or fewer, the CPU multiplies an expert before the bus could copy it.
MOST_TOKENS_ON_HOST = 31
_SLOTS = 2


def added_up_on_host(
    layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor
) -> torch.Tensor:
    """Compute `ExpertLayer.added_up` on the CPU for tokens on a device; the sums are on the device."""
    device, is_locked = tokens.device, can_page_lock(tokens.device.type)
    given = tokens, chosen, router_weights
    tokens, chosen, router_weights = (each.to("cpu", non_blocking=is_locked) for each in given)
    Issued(device).wait()
    sums = layer.added_up(tokens, chosen, router_weights)
    locked = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=is_locked)
    return locked.copy_(sums).to(device, non_blocking=is_locked)


def streamed_experts(
    layer: ExpertLayer, experts: Sequence[int], like: torch.Tensor
) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """
    Yield experts with copies of their two matrices on the device of `like`, a tensor of the experts' dtype.

    An expert is copied while the one before it computes, and stays until the next one is asked for.
    """
    streams = streams_for(like.device)
    slots = [_Slot(layer, like, streams) for _ in range(min(_SLOTS, len(experts)))]
    try:
        for index in experts[:1]:
            slots[0].fetch(index)
        for place, index in enumerate(experts):
            slot = slots[place % _SLOTS]
            streams.compute_after(slot.arrived)
            yield index, (slot.up, slot.down)
            slot.used = streams.computed()
            if place + 1 < len(experts):
                slots[(place + 1) % _SLOTS].fetch(experts[place + 1])
    finally:
        for slot in slots:
            streams.wait(slot.arrived)  # before the memory is freed
            streams.compute_after(slot.arrived)


class _Slot:
    """Memory for one expert on the device, and a page-locked buffer through which it is copied there."""

    def __init__(self, layer: ExpertLayer, like: torch.Tensor, streams: Streams):
        self._streams, self._matrices = streams, (layer.up, layer.down)
        self.up, self.down = (like.new_empty(each.out_sizes + each.token_sizes) for each in self._matrices)
        is_locked = can_page_lock(like.device.type)
        self._on_host = [
            torch.empty(each.shape, dtype=like.dtype, pin_memory=is_locked) for each in (self.up, self.down)
        ]
        self.arrived = None
        # The allocator may hand out memory that running computation still uses.
        self.used = streams.computed()

    def fetch(self, index: int) -> None:
        """Start copying an expert, once the one before is not used any more."""
        self._streams.wait(self.arrived)
        for matrices, out in zip(self._matrices, self._on_host, strict=True):
            matrices.write(index, out)

        def copy() -> None:
            for on_host, on_device in zip(self._on_host, (self.up, self.down), strict=True):
                on_device.copy_(on_host, non_blocking=True)

        self.arrived = self._streams.copy_to_device(copy, after=[self.used])
