"""Experts of a model: modules that keep them as stacked matrices, as transformers' `ExpertsInterface` knows them."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ExpertsInterface

from .coded_weight import CodedWeight
from .coverage import holds_experts
from .matrices import Matrices
from .plain_matrices import PlainMatrices
from .popular_experts import PopularExperts

_SILU = (nn.SiLU, SiLUActivation)


class ExpertLayer:
    """
    The experts of one layer, by what transformers notes on their module.

    Args:
        module: one of `expert_modules`.

    Attributes:
        dtype: of what they compute.
        device: where they are.
        up: what tokens are multiplied with first: gate and up projections, or up projections alone.
        down: what is then multiplied.
        up_bias: `[experts, rows]`, if there is one.
        down_bias: likewise.
        popular: copies of some on the device of the model; `None` where none are kept.
    """

    def __init__(self, module: Any):
        self._module = module
        name = "gate_up_proj" if module.has_gate else "up_proj"
        parameters = module._parameters
        # Parameters of our own kinds are asked for what any tensor has.
        with torch._C.DisableTorchFunctionSubclass():
            self.popular: PopularExperts | None = getattr(parameters["down_proj"], "popular", None)
            self.dtype, self.device = parameters["down_proj"].dtype, parameters["down_proj"].device
            self.up, self.down = (_matrices(parameters[each], module.is_transposed) for each in (name, "down_proj"))
            self.up_bias, self.down_bias = (
                parameters[f"{each}_bias"].detach() if module.has_bias else None for each in (name, "down_proj")
            )

    @property
    def most_tokens(self) -> int:
        """Of an expert, up to which both products are faster with those of other experts."""
        return min(self.up.most_tokens, self.down.most_tokens)

    def added_up(self, tokens: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """
        The weighted sums of what the chosen experts give, in host memory.

        Args:
            tokens: `[tokens, hidden]`, of `dtype`; few of each expert.
            chosen: int64 `[tokens, choices]`; the number of experts means none.
            shares: `[tokens, choices]`, what each choice counts.

        Returns:
            `[tokens, hidden]`, in float32 or the type of the shares if that is wider.
        """
        if self.has_silu_gate:
            sums = self.up.add_up_experts(self.down, tokens, chosen, shares, self.up_bias, self.down_bias)
            if sums is not None:
                return sums
        shares = shares.to(torch.promote_types(shares.dtype, torch.float32))
        flat, out = chosen.flatten(), torch.zeros(tokens.shape, dtype=shares.dtype)
        pairs = (flat != self.up.count).nonzero()[:, 0]
        if len(pairs):
            of, chosen = pairs // chosen.shape[1], flat[pairs].unsqueeze(-1)
            states = self.activated(self.up.multiply_chosen(tokens[of], chosen, self.up_bias))
            states = self.finished(self.down.multiply_chosen(states, chosen, self.down_bias))
            out.index_add_(0, of, states * shares.flatten()[pairs].unsqueeze(-1))
        return out

    @property
    def has_silu_gate(self) -> bool:
        """Whether there is nothing but transformers' own gate, a SiLU, between the products, and nothing after them."""
        module = self._module
        is_default = module.has_gate and type(module)._apply_gate.__module__ == ExpertsInterface.__module__
        return is_default and isinstance(module.act_fn, _SILU) and not module.has_post_expert_norm

    def activated(self, states: torch.Tensor) -> torch.Tensor:
        """What goes from the first to the second product, `[..., down's columns]`."""
        module = self._module
        result: torch.Tensor = module._apply_gate(states) if module.has_gate else module.act_fn(states)
        return result

    def finished(self, states: torch.Tensor) -> torch.Tensor:
        """What comes out of an expert, before it is weighted."""
        result: torch.Tensor = self._module.post_expert_norm(states) if self._module.has_post_expert_norm else states
        return result


def choices_of(chosen: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Choices of some experts only.

    Args:
        chosen: int64 `[tokens, choices]`; the number of experts means none.
        experts: bool `[experts]`, which.

    Returns:
        The tokens that chose some of them, int64 `[found]`, and their choices, `[found, choices]`.
    """
    is_kept = torch.cat([experts, experts.new_zeros(1)])[chosen]
    tokens = is_kept.any(1).nonzero()[:, 0]
    return tokens, chosen.where(is_kept, len(experts))[tokens]


def expert_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of a model that hold stacked experts, by name; those that `ExpertLayer` understands."""
    return {name: module for name, module in model.named_modules() if _is_stack(module)}


def _is_stack(module: Any) -> bool:
    noted = ("has_gate", "has_bias", "has_post_expert_norm")
    if not holds_experts(module) or not all(isinstance(getattr(module, name, None), bool) for name in noted):
        return False
    weights = [module._parameters.get(name) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")]
    return all(weight is not None and weight.dim() == 3 for weight in weights)


def _matrices(weight: torch.Tensor, is_transposed: bool) -> Matrices:
    if isinstance(weight, CodedWeight):
        return weight.matrices
    weight = weight.detach()
    return PlainMatrices(weight.transpose(1, 2) if is_transposed else weight)
