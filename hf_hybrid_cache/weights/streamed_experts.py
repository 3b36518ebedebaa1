"""
Experts in host memory of a model on an accelerator.

Few tokens go to the experts: what they have chosen is multiplied on the CPU, and only activations cross the bus. To
many tokens, as in a prompt, an expert goes: the bus brings it once for all of them, and the next one while it computes.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from ..storage import Issued, Streams, can_page_lock, streams_for
from .expert_layers import ExpertLayer, choices_of
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
    few = _few_across if len(tokens) < STREAMED_FROM else _many_across
    return few(layer, tokens, chosen, weights.to(torch.promote_types(weights.dtype, torch.float32)))


def _few_across(layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """No expert has so many tokens that it would be worth bringing it to the device; some may be there."""
    popular = layer.popular
    if popular is None:
        return _on_cpu(layer, tokens, chosen, weights)
    on_host, held = chosen.to("cpu"), popular.held(tokens.device)
    choices, flat = chosen.shape[1], on_host.flatten()
    of_held = [(index, (flat == index).nonzero()[:, 0]) for index in held]
    of_held = [(index, pairs) for index, pairs in of_held if len(pairs)]
    # Issued first, so that both compute at the same time.
    there = [
        (pairs, _on_device(layer, index, tokens[pairs // choices], *held[index]) * _picked(weights, pairs))
        for index, pairs in of_held
    ]
    if of_held:
        flat = flat.index_fill(0, torch.cat([pairs for _, pairs in of_held]), layer.up.count)
    out = _on_cpu(layer, tokens, flat.view_as(on_host), weights)
    for pairs, states in there:
        out.index_add_(0, pairs.to(out.device) // choices, states)
    if popular.note(_counts(layer, on_host), len(tokens)):
        for index, up, down in _streamed(layer, popular.wanted()[:1], tokens):
            popular.keep(index, up, down)
    return out


def _many_across(layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts with many tokens are brought to the device, unless they are there; the others are computed on the CPU."""
    choices, device, popular = chosen.shape[1], tokens.device, layer.popular
    out = torch.zeros(tokens.shape, dtype=weights.dtype, device=device)

    def add(index: int, up: torch.Tensor, down: torch.Tensor) -> None:
        of = of_expert[index]
        states = _on_device(layer, index, tokens[of // choices], up, down)
        out.index_add_(0, of // choices, states * _picked(weights, of))

    on_host = chosen.to("cpu")
    counts = _counts(layer, on_host)
    wanted = set(popular.wanted()) if popular is not None and popular.note(counts, len(tokens)) else set()
    held = popular.held(device) if popular is not None else {}
    pairs = chosen.flatten().argsort(stable=True)  # those of an expert side by side
    of_expert = dict(enumerate(pairs[: int(counts.sum())].split(counts.tolist())))
    many = [index for index, of in of_expert.items() if len(of) >= STREAMED_FROM and index not in held]
    for index, (up, down) in held.items():
        if counts[index]:
            add(index, up, down)
    is_few = counts < STREAMED_FROM
    is_few[list(held)] = False
    of_few, left = choices_of(on_host, is_few)
    if len(of_few):
        there = of_few.to(device)
        out[there] += _on_cpu(layer, tokens[there], left, weights[there])
    for index, up, down in _streamed(layer, many, tokens):
        add(index, up, down)
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
    """What an expert whose weights are on the device gives, `[tokens, hidden]`, not weighted."""
    up_bias, down_bias = (
        None if each is None else each[index].to(tokens.device) for each in (layer.up_bias, layer.down_bias)
    )
    states = functional.linear(layer.activated(functional.linear(tokens, up, up_bias)), down, down_bias)
    return layer.finished(states)


def _picked(weights: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Those of some pairs, `[pairs, 1]`."""
    return weights.flatten()[pairs.to(weights.device)].unsqueeze(-1)


def _on_cpu(layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sums of `ExpertLayer.added_up`, of tokens on a device and on it."""
    device, is_locked = tokens.device, can_page_lock(tokens.device.type)
    tokens, chosen, weights = (each.to("cpu", non_blocking=is_locked) for each in (tokens, chosen, weights))
    Issued(device).wait()
    sums = layer.added_up(tokens, chosen, weights)
    locked = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=is_locked)
    return locked.copy_(sums).to(device, non_blocking=is_locked)


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
