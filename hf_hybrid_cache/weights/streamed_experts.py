"""
Experts in host memory of a model on an accelerator.

Few tokens go to the experts: what they have chosen is multiplied on the CPU, and only activations cross the bus. To
many tokens, as in a prompt, an expert goes: the bus brings it once for all of them, and the next one while it computes.
"""

from collections.abc import Iterable

import torch
from torch.nn import functional

from ..storage import Issued, Streams, can_page_lock, streams_for
from .expert_layers import ExpertLayer
from .matrices import Matrices

# By calculation: a CPU multiplies fewer tokens with an expert before the bus could bring it.
STREAMED_FROM = 32
_SLOTS = 2


def experts_across_the_bus(
    layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """
    What the chosen experts give.

    Args:
        layer: in host memory.
        tokens: `[tokens, hidden]` on the device, of the type of the experts.
        chosen: int64 `[tokens, choices]` likewise; the number of experts means none.
        weights: `[tokens, choices]` likewise.

    Returns:
        `[tokens, hidden]` on the device, in float32 or the type of the weights if that is wider.
    """
    choices, count = chosen.shape[1], layer.up.count
    precise = torch.promote_types(weights.dtype, torch.float32)
    flat_weights = weights.flatten().to(precise)
    out = torch.zeros(tokens.shape, dtype=precise, device=tokens.device)

    def add(states: torch.Tensor, pairs: torch.Tensor) -> None:
        states = layer.finished(states) * flat_weights[pairs].unsqueeze(-1)
        out.index_add_(0, pairs // choices, states)

    if len(tokens) < STREAMED_FROM:
        states = _on_cpu(layer, tokens, chosen)
        states = layer.finished(states).view(*chosen.shape, -1) * weights.unsqueeze(-1)
        return states.sum(1, dtype=precise)
    flat = chosen.flatten()
    pairs = flat.argsort(stable=True)  # those of an expert side by side
    counts = torch.bincount(flat.to("cpu"), minlength=count + 1)[:count]
    is_few = counts < STREAMED_FROM
    of_few = pairs[is_few.repeat_interleave(counts).nonzero()[:, 0].to(tokens.device)]
    ends = counts.cumsum(0).tolist()
    many = [
        (index, pairs[end - size : end])
        for index, (end, size) in enumerate(zip(ends, counts.tolist(), strict=True))
        if size >= STREAMED_FROM
    ]
    if len(of_few):
        add(_on_cpu(layer, tokens[of_few // choices], flat[of_few].unsqueeze(-1)), of_few)
    for index, of, up, down in _streamed(layer, many, tokens):
        up_bias, down_bias = (
            None if each is None else each[index].to(tokens.device) for each in (layer.up_bias, layer.down_bias)
        )
        states = layer.activated(functional.linear(tokens[of // choices], up, up_bias))
        add(functional.linear(states, down, down_bias), of)
    return out


def _on_cpu(layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What experts give for the tokens that chose them, `[tokens * choices, hidden]` on the tokens' device."""
    device, is_locked = tokens.device, can_page_lock(tokens.device.type)
    tokens, chosen = (each.to("cpu", non_blocking=is_locked) for each in (tokens, chosen))
    Issued(device).wait()
    states = layer.activated(layer.up.multiply_chosen(tokens, chosen, layer.up_bias))
    states = layer.down.multiply_chosen(states, chosen, layer.down_bias)
    locked = torch.empty(states.shape, dtype=states.dtype, pin_memory=is_locked)
    return locked.copy_(states).to(device, non_blocking=is_locked)


class _Slot:
    """
    Room for one expert on the device, and in page-locked memory on its way there.

    Attributes:
        up: on the device.
        down: likewise.
    """

    def __init__(self, layer: ExpertLayer, like: torch.Tensor, streams: Streams):
        self._streams, self._layer = streams, layer
        self.up, self.down = (self._room(each, like) for each in (layer.up, layer.down))
        is_locked = can_page_lock(like.device.type)
        self._on_host = [
            torch.empty(each.shape, dtype=like.dtype, pin_memory=is_locked) for each in (self.up, self.down)
        ]
        self._arrived = None
        # Its memory may be what computation that is still under way has given back.
        self._used = streams.computed()

    @staticmethod
    def _room(matrices: Matrices, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(matrices.out_sizes + matrices.token_sizes)

    def fetch(self, index: int) -> None:
        """Let an expert be on its way, once the one before is used no more."""
        self._streams.wait(self._arrived)
        for matrices, out in zip((self._layer.up, self._layer.down), self._on_host, strict=True):
            matrices.write(index, out)

        def copy() -> None:
            for on_host, on_device in zip(self._on_host, (self.up, self.down), strict=True):
                on_device.copy_(on_host, non_blocking=True)

        self._arrived = self._streams.copy_to_device(copy, after=[self._used])

    def use(self) -> None:
        """Let computation wait for the expert."""
        self._streams.compute_after(self._arrived)

    def note_used(self) -> None:
        """All computation that reads it has been issued."""
        self._used = self._streams.computed()

    def end(self) -> None:
        """Let nothing be under way when its memory is given back."""
        self._streams.wait(self._arrived)
        self._streams.compute_after(self._arrived)


def _streamed(
    layer: ExpertLayer, experts: list[tuple[int, torch.Tensor]], like: torch.Tensor
) -> Iterable[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Experts with their pairs and their weights on the device, one after the other, the next one on its way."""
    streams = streams_for(like.device)
    slots = [_Slot(layer, like, streams) for _ in range(min(_SLOTS, len(experts)))]
    try:
        for index, _ in experts[:1]:
            slots[0].fetch(index)
        for place, (index, pairs) in enumerate(experts):
            slot = slots[place % _SLOTS]
            slot.use()
            yield index, pairs, slot.up, slot.down
            slot.note_used()
            if place + 1 < len(experts):
                slots[(place + 1) % _SLOTS].fetch(experts[place + 1][0])
    finally:
        for slot in slots:
            slot.end()
