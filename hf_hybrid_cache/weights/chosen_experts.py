"""
Experts on the CPU: only those that a token has chosen are read, all of a layer by one call of a kernel.

Transformers' own ways loop over experts, or copy those that are chosen first, and all multiply token by token with
products that are made for many tokens.
"""

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .coded_weight import outside_of_graphs
from .expert_layers import ExpertLayer, choices_of
from .streamed_experts import experts_across_the_bus


@outside_of_graphs
def chosen_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """
    What transformers' `ExpertsInterface` asks of an implementation.

    Args:
        module: one of `expert_modules`.
        hidden_states: `[tokens, hidden]`, on the device of the experts, or on another one while they are in host
            memory.
        top_k_index: `[tokens, choices]`; the number of experts means none.
        top_k_weights: `[tokens, choices]`, of the choices.

    Returns:
        `[tokens, hidden]`, the weighted sum of what the chosen experts give.

    Raises:
        RuntimeError: gradients are asked for that would have to cross the bus.
    """
    layer = ExpertLayer(module)
    is_here = hidden_states.device == layer.device
    if is_here and (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not hidden_states.is_cpu):
        theirs: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
        return theirs
    if not len(hidden_states):
        return torch.zeros_like(hidden_states)
    tokens = hidden_states.to(layer.dtype)
    if not is_here:
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            raise RuntimeError(
                "Experts in host memory give no gradients to a model on another device. Use torch.no_grad(), or "
                "move_experts_to_host with a model on the CPU."
            )
        result = experts_across_the_bus(layer, tokens, top_k_index, top_k_weights)
    elif len(tokens) <= layer.most_tokens:
        result = layer.added_up(tokens, top_k_index, top_k_weights)
    else:
        result = _many(layer, tokens, top_k_index, top_k_weights)
    return result.to(hidden_states.dtype)


def _many(layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts with many tokens one by one; the others, which few tokens chose, all at once."""
    # Sums are of float32: transformers' loop rounds them once for every expert of a token.
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    flat, choices = chosen.flatten(), chosen.shape[1]
    counts = torch.bincount(flat, minlength=layer.up.count + 1)[: layer.up.count]
    out = torch.zeros(tokens.shape, dtype=weights.dtype)
    of_few, left = choices_of(chosen, counts <= layer.most_tokens)
    if len(of_few) == len(tokens):
        out = layer.added_up(tokens, left, weights)
    elif len(of_few):
        out[of_few] = layer.added_up(tokens[of_few], left, weights[of_few])
    pairs, start = flat.argsort(stable=True), 0
    for index, count in enumerate(counts.tolist()):
        if count > layer.most_tokens:
            of = pairs[start : start + count]
            up_bias, down_bias = (None if each is None else each[index] for each in (layer.up_bias, layer.down_bias))
            states = layer.activated(layer.up.multiply(tokens[of // choices], index, up_bias))
            states = layer.finished(layer.down.multiply(states, index, down_bias))
            out.index_add_(0, of // choices, states * weights.flatten()[of].unsqueeze(-1))
        start += count
    return out
