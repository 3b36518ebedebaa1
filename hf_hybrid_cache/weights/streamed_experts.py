"""
Computing experts in host memory for a model on an accelerator.

With few tokens, the CPU multiplies the chosen experts, and only activations cross the bus. An expert that many tokens
of a prompt have chosen is copied to the device once, the next one while this one computes.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from ..storage import Issued, Streams, can_page_lock, streams_for
from .expert_layers import ExpertLayer, choices_of
from .matrices import Matrices

# Calculated: with fewer tokens, the CPU multiplies an expert before the bus could copy it.
STREAMED_FROM = 32
_SLOTS = 2


def experts_across_the_bus(
    layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor
) -> torch.Tensor:
    """
    Compute the chosen experts of a layer.

    Args:
        layer: experts in host memory.
        tokens: `[tokens, hidden]` on the device, of the experts' dtype.
        chosen: int64 `[tokens, choices]` on the device, indices of experts; the number of experts stands for no expert.
        router_weights: `[tokens, choices]` on the device.

    Returns:
        `[tokens, hidden]` on the device, in float32 or the dtype of the router weights if that is wider.
    """
    few = _few_across if len(tokens) < STREAMED_FROM else _many_across
    dtype = torch.promote_types(router_weights.dtype, torch.float32)
    return few(layer, tokens, chosen, router_weights.to(dtype))


def _few_across(
    layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor
) -> torch.Tensor:
    """Compute with fewer tokens than are worth a copy of an expert; hot experts may be on the device already."""
    hot = layer.hot
    if hot is None:
        return _on_cpu(layer, tokens, chosen, router_weights)
    on_host, held = chosen.to("cpu"), hot.held(tokens.device)
    choices, flat = chosen.shape[1], on_host.flatten()
    of_held = [(index, (flat == index).nonzero()[:, 0]) for index in held]
    of_held = [(index, pairs) for index, pairs in of_held if len(pairs)]
    # The device's work is issued first, so that both compute at the same time.
    there = [
        (pairs, _on_device(layer, index, tokens[pairs // choices], *held[index]) * _picked(router_weights, pairs))
        for index, pairs in of_held
    ]
    if of_held:
        flat = flat.index_fill(0, torch.cat([pairs for _, pairs in of_held]), layer.up.count)
    out = _on_cpu(layer, tokens, flat.view_as(on_host), router_weights)
    for pairs, states in there:
        out.index_add_(0, pairs.to(out.device) // choices, states)
    if hot.note(_counts(layer, on_host), len(tokens)):
        for index, up, down in _streamed(layer, hot.wanted()[:1], tokens):
            hot.keep(index, up, down)
    return out


def _many_across(
    layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor
) -> torch.Tensor:
    """Compute experts with many tokens, and hot experts, on the device, and the others on the CPU."""
    choices, device, hot = chosen.shape[1], tokens.device, layer.hot
    out = torch.zeros(tokens.shape, dtype=router_weights.dtype, device=device)

    def add(index: int, up: torch.Tensor, down: torch.Tensor) -> None:
        of = of_expert[index]
        states = _on_device(layer, index, tokens[of // choices], up, down)
        out.index_add_(0, of // choices, states * _picked(router_weights, of))

    on_host = chosen.to("cpu")
    counts = _counts(layer, on_host)
    wanted = set(hot.wanted()) if hot is not None and hot.note(counts, len(tokens)) else set()
    held = hot.held(device) if hot is not None else {}
    pairs = chosen.flatten().argsort(stable=True)  # pairs of an expert stand side by side
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
        out[there] += _on_cpu(layer, tokens[there], left, router_weights[there])
    for index, up, down in _streamed(layer, many, tokens):
        add(index, up, down)
        if index in wanted:
            assert hot is not None
            hot.keep(index, up, down)
    return out


def _counts(layer: ExpertLayer, chosen: torch.Tensor) -> torch.Tensor:
    """The number of tokens that have chosen each expert, int64 `[experts]` in host memory."""
    return torch.bincount(chosen.flatten(), minlength=layer.up.count + 1)[: layer.up.count]


def _on_device(
    layer: ExpertLayer, index: int, tokens: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The output of an expert whose weights are on the device, `[tokens, hidden]`, without router weights."""
    up_bias, down_bias = (
        None if each is None else each[index].to(tokens.device) for each in (layer.up_bias, layer.down_bias)
    )
    states = functional.linear(layer.activated(functional.linear(tokens, up, up_bias)), down, down_bias)
    return layer.finished(states)


def _picked(router_weights: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The router weights of some pairs, `[pairs, 1]`."""
    return router_weights.flatten()[pairs.to(router_weights.device)].unsqueeze(-1)


def _on_cpu(
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


class _Slot:
    """
    Memory for one expert on the device, and a page-locked buffer through which it is copied there.

    Attributes:
        up: the expert's first matrix on the device.
        down: the expert's second matrix on the device.
    """

    def __init__(self, layer: ExpertLayer, like: torch.Tensor, streams: Streams):
        self._streams, self._layer = streams, layer
        self.up, self.down = (self._room(each, like) for each in (layer.up, layer.down))
        is_locked = can_page_lock(like.device.type)
        self._on_host = [
            torch.empty(each.shape, dtype=like.dtype, pin_memory=is_locked) for each in (self.up, self.down)
        ]
        self._arrived = None
        # The allocator may hand out memory that running computation still uses.
        self._used = streams.computed()

    @staticmethod
    def _room(matrices: Matrices, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(matrices.out_sizes + matrices.token_sizes)

    def fetch(self, index: int) -> None:
        """Start copying an expert, once the one before is not used any more."""
        self._streams.wait(self._arrived)
        for matrices, out in zip((self._layer.up, self._layer.down), self._on_host, strict=True):
            matrices.write(index, out)

        def copy() -> None:
            for on_host, on_device in zip(self._on_host, (self.up, self.down), strict=True):
                on_device.copy_(on_host, non_blocking=True)

        self._arrived = self._streams.copy_to_device(copy, after=[self._used])

    def use(self) -> None:
        """Make computation wait until the expert has arrived."""
        self._streams.compute_after(self._arrived)

    def note_used(self) -> None:
        """Note that all computation that reads the expert has been issued."""
        self._used = self._streams.computed()

    def end(self) -> None:
        """Wait for the last copy, so that the memory can be freed."""
        self._streams.wait(self._arrived)
        self._streams.compute_after(self._arrived)


def _streamed(
    layer: ExpertLayer, experts: Sequence[int], like: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield experts with their weights on the device, one after the other, while the next one is copied."""
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
