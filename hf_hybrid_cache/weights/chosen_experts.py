"""
The implementation of experts that transformers calls: on the CPU a kernel reads only the chosen ones.

transformers' own implementations loop over experts or copy the chosen ones, and use products that are made for many
tokens.

For a model on an accelerator the CPU multiplies few tokens with the chosen experts, and only activations cross the bus.
An expert that many tokens of a prompt have chosen is copied to the device once, the next one while this one computes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..graph_breaks import outside_of_graphs
from ..storage import Issued, Streams, can_page_lock, streams_for
from .expert_layers import ExpertLayer, require_experts

# The name under which transformers knows `chosen_experts`.
IMPLEMENTATION = "hf_hybrid_cache"
# Calculated: with so many tokens or fewer, the CPU multiplies an expert before the bus could copy it.
_MOST_TOKENS_ON_HOST = 31
_SLOTS = 2


def use_chosen_experts(model: PreTrainedModel, undo: ExitStack | None = None) -> None:
    """
    Let a model compute its experts with `chosen_experts`, until `undo` ends.

    Raises:
        ValueError: the model has no experts that `chosen_experts` can compute; it is as before.
    """
    experts = require_experts(model)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, chosen_experts)
    before = model.get_experts_implementation()
    if undo is not None:
        undo.callback(model.set_experts_implementation, before)
    model.set_experts_implementation(IMPLEMENTATION)
    others = {type(each).__name__ for each in experts.values() if each.config._experts_implementation != IMPLEMENTATION}
    if others:
        model.set_experts_implementation(before)
        raise ValueError(
            f"transformers lets nobody choose how {' and '.join(sorted(others))} of {type(model).__name__} compute: "
            "set_experts_implementation has no effect on them."
        )


def use_chosen_experts_if_any(model: PreTrainedModel, undo: ExitStack | None = None) -> None:
    """Like `use_chosen_experts`, but leave a model without such experts as it is."""
    with suppress(ValueError):
        use_chosen_experts(model, undo)


@outside_of_graphs
def chosen_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """
    Compute the chosen experts: the function that transformers' `ExpertsInterface` calls.

    Args:
        module: one of `expert_modules`.
        hidden_states: `[tokens, hidden]`, on the device of the experts, or on another device if they are in host
            memory.
        top_k_index: integers, `[tokens, choices]`, indices of experts; the number of experts stands for no expert.
        top_k_weights: `[tokens, choices]`, router weights.

    Returns:
        `[tokens, hidden]`, the weighted sum of the chosen experts' outputs.

    Raises:
        IndexError: an index is of no expert.
        RuntimeError: gradients would have to cross the bus.
        TypeError: indices are no integers.
        ValueError: shapes do not fit each other.
    """
    layer = ExpertLayer(module)
    is_here = hidden_states.device == layer.device
    if is_here and (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not hidden_states.is_cpu):
        theirs: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
        return theirs
    if not len(hidden_states):
        return torch.zeros_like(hidden_states)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        raise RuntimeError(
            "Experts in host memory give no gradients to a model on another device. Use torch.no_grad(), or "
            "move_experts_to_host with a model on the CPU."
        )
    _require_fit(layer, hidden_states, top_k_index, top_k_weights)
    tokens, top_k_index = hidden_states.to(layer.dtype), top_k_index.long()
    few: Callable[..., torch.Tensor]
    few, most = layer.added_up, layer.most_tokens
    if not is_here:
        few, most = partial(_added_up_on_host, layer), _MOST_TOKENS_ON_HOST
    if len(tokens) <= most:
        result = few(tokens, top_k_index, top_k_weights)
    else:
        result = _many(layer, tokens, top_k_index, top_k_weights, few, most)
    return result.to(hidden_states.dtype)


def _require_fit(layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor) -> None:
    """Check what kernels read by addresses alone."""
    if chosen.dtype == torch.bool or chosen.dtype.is_floating_point:
        raise TypeError(f"Indices of experts are integers, got {chosen.dtype}.")
    (columns,) = layer.up.token_sizes
    if tokens.shape != (len(chosen), columns) or router_weights.shape != chosen.shape:
        raise ValueError(
            f"Experts of {columns} columns got tokens {list(tokens.shape)}, indices {list(chosen.shape)} and router "
            f"weights {list(router_weights.shape)}."
        )


def _many(
    layer: ExpertLayer,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    router_weights: torch.Tensor,
    few: Callable[..., torch.Tensor],
    most: int,
) -> torch.Tensor:
    """Compute experts with more than `most` tokens one by one, and the others by one call of `few`."""
    # Sums are in float32; transformers' loop rounds the sum after each expert of a token.
    router_weights = router_weights.to(torch.promote_types(router_weights.dtype, torch.float32))
    out = torch.zeros(tokens.shape, dtype=router_weights.dtype, device=tokens.device)
    on_host, num_experts, choices = chosen.to("cpu"), layer.up.count, chosen.shape[1]
    counts = torch.bincount(on_host.flatten(), minlength=num_experts + 1)[:num_experts]
    has_few = counts <= most

    is_of_few = torch.cat([has_few, torch.tensor([False])])[on_host]
    of_few = is_of_few.any(1).nonzero()[:, 0]
    if len(of_few):
        given = on_host.where(is_of_few, num_experts)[of_few]
        of_few = of_few.to(tokens.device)
        out[of_few] = few(tokens[of_few], given, router_weights[of_few]).to(out.dtype)

    pairs = chosen.flatten().argsort(stable=True)  # pairs of token and choice; those of an expert stand side by side
    of_expert = pairs[: int(counts.sum())].split(counts.tolist())
    has_many = (~has_few).nonzero()[:, 0].tolist()
    in_turn = [(index, None) for index in has_many] if tokens.is_cpu else streamed_experts(layer, has_many, tokens)
    for index, weights in in_turn:
        of = of_expert[index] // choices
        states = layer.output(index, tokens[of], weights)
        out.index_add_(0, of, states * router_weights.flatten()[of_expert[index]].unsqueeze(-1))
    return out


def _added_up_on_host(
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
