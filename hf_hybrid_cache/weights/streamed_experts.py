"""
Experts in host memory of a model on an accelerator.

Few tokens go to the experts: what they have chosen is multiplied on the CPU, and only activations cross the bus. To
many tokens, as in a prompt, an expert goes: the bus brings it once for all of them, and the next one while it computes.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from ..storage import Issued, Streams, can_page_lock, streams_for
from .expert_layers import ExpertLayer
from .matrices import Matrices
from .popular_experts import PopularExperts

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
    few = _few_across if len(tokens) < STREAMED_FROM else _many_across
    return few(layer, tokens, chosen, weights.to(torch.promote_types(weights.dtype, torch.float32)))


def _few_across(layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """No expert has so many tokens that it would be worth bringing it to the device; some may be there."""
    popular = layer.popular
    states = _on_cpu(layer, tokens, chosen) if popular is None else _on_both(layer, popular, tokens, chosen)
    return (layer.finished(states).view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


def _on_both(layer: ExpertLayer, popular: PopularExperts, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What experts give, as `_on_cpu`, those that are on the device there."""
    on_host, held = chosen.to("cpu"), popular.held(tokens.device)
    of_held = [(index, (on_host.flatten() == index).nonzero()[:, 0]) for index in held]
    of_held = [(index, pairs) for index, pairs in of_held if len(pairs)]
    # Issued first, so that both compute at the same time.
    there = [
        (pairs, _on_device(layer, index, tokens[pairs // chosen.shape[1]], *held[index])) for index, pairs in of_held
    ]
    left = on_host
    if of_held:
        left = on_host.flatten().index_fill(0, torch.cat([pairs for _, pairs in of_held]), layer.up.count)
    states = _on_cpu(layer, tokens, left.view_as(on_host))
    for pairs, of_expert in there:
        states[pairs] = of_expert
    if popular.note(_counts(layer, on_host), len(tokens)):
        for index, up, down in _streamed(layer, popular.wanted()[:1], tokens):
            popular.keep(index, up, down)
    return states


def _many_across(layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts with many tokens are brought to the device, unless they are there; the others are computed on the CPU."""
    choices, device, popular = chosen.shape[1], tokens.device, layer.popular
    flat, flat_weights = chosen.flatten(), weights.flatten()
    out = torch.zeros(tokens.shape, dtype=weights.dtype, device=device)

    def add(states: torch.Tensor, pairs: torch.Tensor) -> None:
        out.index_add_(0, pairs // choices, layer.finished(states) * flat_weights[pairs].unsqueeze(-1))

    counts = _counts(layer, chosen.to("cpu"))
    wanted = set(popular.wanted()) if popular is not None and popular.note(counts, len(tokens)) else set()
    held = popular.held(device) if popular is not None else {}
    pairs = flat.argsort(stable=True)  # those of an expert side by side
    of_expert = dict(enumerate(pairs[: int(counts.sum())].split(counts.tolist())))
    many = [index for index, of in of_expert.items() if len(of) >= STREAMED_FROM and index not in held]
    few = [of for index, of in of_expert.items() if 0 < len(of) < STREAMED_FROM and index not in held]
    for index, (up, down) in held.items():
        if len(of := of_expert[index]):
            add(_on_device(layer, index, tokens[of // choices], up, down), of)
    if few:
        of = torch.cat(few)
        add(_on_cpu(layer, tokens[of // choices], flat[of].unsqueeze(-1)), of)
    for index, up, down in _streamed(layer, many, tokens):
        of = of_expert[index]
        add(_on_device(layer, index, tokens[of // choices], up, down), of)
        if index in wanted:
            assert popular is not None
            popular.keep(index, up, down)
    return out


def _counts(layer: ExpertLayer, chosen: torch.Tensor) -> torch.Tensor:
    """How many have chosen each expert, int64 `[experts]` in host memory."""
    return torch.bincount(chosen.flatten(), minlength=layer.up.count + 1)[: layer.up.count]


def _on_device(
    layer: ExpertLayer, index: int, tokens: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """What an expert whose weights are on the device gives, `[tokens, hidden]`."""
    up_bias, down_bias = (
        None if each is None else each[index].to(tokens.device) for each in (layer.up_bias, layer.down_bias)
    )
    return functional.linear(layer.activated(functional.linear(tokens, up, up_bias)), down, down_bias)


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
    layer: ExpertLayer, experts: Sequence[int], like: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Experts with their weights on the device, one after the other, the next one on its way."""
    streams = streams_for(like.device)
    slots = [_Slot(layer, like, streams) for _ in range(min(_SLOTS, len(experts)))]
    try:
        for index in experts[:1]:
            slots[0].fetch(index)
        for place, index in enumerate(experts):
            slot = slots[place % _SLOTS]
            slot.use()
            yield index, slot.up, slot.down
            slot.note_used()
            if place + 1 < len(experts):
                slots[(place + 1) % _SLOTS].fetch(experts[place + 1])
    finally:
        for slot in slots:
            slot.end()
