"""
Experts on the CPU: a kernel reads only the chosen experts, one call for a layer.

transformers' own implementations loop over experts or copy the chosen ones, and use products that are made for many
tokens.
"""

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..graph_breaks import outside_of_graphs
from .expert_layers import ExpertLayer, choices_of
from .streamed_experts import experts_across_the_bus


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
        top_k_index: `[tokens, choices]`, indices of experts; the number of experts stands for no expert.
        top_k_weights: `[tokens, choices]`, router weights.

    Returns:
        `[tokens, hidden]`, the weighted sum of the chosen experts' outputs.

    Raises:
        RuntimeError: gradients would have to cross the bus.
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


def _many(layer: ExpertLayer, tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
    """Compute experts with many tokens one by one, and all experts with few tokens in one call."""
    # Sums are in float32; transformers' loop rounds the sum after each expert of a token.
    router_weights = router_weights.to(torch.promote_types(router_weights.dtype, torch.float32))
    flat, choices = chosen.flatten(), chosen.shape[1]
    counts = torch.bincount(flat, minlength=layer.up.count + 1)[: layer.up.count]
    out = torch.zeros(tokens.shape, dtype=router_weights.dtype)
    of_few, left = choices_of(chosen, counts <= layer.most_tokens)
    if len(of_few) == len(tokens):
        out = layer.added_up(tokens, left, router_weights)
    elif len(of_few):
        out[of_few] = layer.added_up(tokens[of_few], left, router_weights[of_few])
    pairs, start = flat.argsort(stable=True), 0
    for index, count in enumerate(counts.tolist()):
        if count > layer.most_tokens:
            of = pairs[start : start + count]
            up_bias, down_bias = (None if each is None else each[index] for each in (layer.up_bias, layer.down_bias))
            states = layer.activated(layer.up.multiply(tokens[of // choices], index, up_bias))
            states = layer.finished(layer.down.multiply(states, index, down_bias))
            out.index_add_(0, of // choices, states * router_weights.flatten()[of].unsqueeze(-1))
        start += count
    return out
