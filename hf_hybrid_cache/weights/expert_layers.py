"""Modules that hold a layer's experts as stacked matrices, in the form of transformers' `ExpertsInterface`."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ExpertsInterface

from .coverage import holds_experts
from .matrices import Matrices, PlainMatrices
from .quantized_weight import QuantizedWeight

_SILU = (nn.SiLU, SiLUActivation)


class ExpertLayer:
    """
    The experts of one layer.

    Args:
        module: one of `expert_modules`.

    Attributes:
        dtype: of hidden states and weights.
        device: of the weights.
        up: matrices of the first product: gate and up projections, or up projections alone.
        down: matrices of the second product.
        up_bias: `[experts, rows]`, if there is one.
        down_bias: `[experts, rows]`, if there is one.

    Raises:
        ValueError: a bias has another shape.
    """

    def __init__(self, module: Any):
        self._module = module
        names = _names_of_products(module)
        parameters = module._parameters
        # The attributes are those of plain tensors, so HostWeight and QuantizedWeight need not answer.
        with torch._C.DisableTorchFunctionSubclass():
            self.dtype, self.device = parameters["down_proj"].dtype, parameters["down_proj"].device
            self.up, self.down = (_matrices(parameters[name], module.is_transposed) for name in names)
            self.up_bias, self.down_bias = (
                self._bias(name, each) if module.has_bias else None
                for name, each in zip(names, (self.up, self.down), strict=True)
            )

    def _bias(self, name: str, matrices: Matrices) -> torch.Tensor:
        """The bias of a product, in the dtype of the weights, as kernels read it by its address."""
        bias: torch.Tensor = self._module._parameters[f"{name}_bias"].detach()
        sizes = matrices.count, *matrices.out_sizes
        if bias.shape != sizes:
            raise ValueError(f"{name}_bias is {list(bias.shape)}, and {name} needs {list(sizes)}.")
        return bias.to(self.dtype)

    @property
    def most_tokens(self) -> int:
        """The most tokens of an expert with which one call for all experts is faster than a product for each."""
        return min(self.up.most_tokens, self.down.most_tokens)

    def added_up(self, tokens: torch.Tensor, chosen: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
        """
        Sum up the outputs of the chosen experts, times their router weights, in host memory.

        Args:
            tokens: `[tokens, hidden]`, of `dtype`; few for each expert.
            chosen: int64 `[tokens, choices]`, indices of experts; the number of experts stands for no expert.
            router_weights: `[tokens, choices]`.

        Returns:
            `[tokens, hidden]`, in float32 or the dtype of the router weights if that is wider.
        """
        if self.has_silu_gate:
            sums = self.up.add_up_experts(self.down, tokens, chosen, router_weights, self.up_bias, self.down_bias)
            if sums is not None:
                return sums
        router_weights = router_weights.to(torch.promote_types(router_weights.dtype, torch.float32))
        flat, out = chosen.flatten(), torch.zeros(tokens.shape, dtype=router_weights.dtype)
        pairs = (flat != self.up.count).nonzero()[:, 0]
        if len(pairs):
            of, chosen = pairs // chosen.shape[1], flat[pairs].unsqueeze(-1)
            states = self._activated(self.up.multiply_chosen(tokens[of], chosen, self.up_bias))
            states = self._finished(self.down.multiply_chosen(states, chosen, self.down_bias))
            out.index_add_(0, of, states * router_weights.flatten()[pairs].unsqueeze(-1))
        return out

    def output(
        self, index: int, tokens: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """
        Compute the output of one expert for many tokens, `[tokens, hidden]`, without router weights.

        `weights` are copies of its two matrices on the device of the tokens; without them, host memory is read.
        """
        up_bias, down_bias = (
            None if each is None else each[index].to(tokens.device) for each in (self.up_bias, self.down_bias)
        )
        if weights is None:
            states = self._activated(self.up.multiply(tokens, index, up_bias))
            return self._finished(self.down.multiply(states, index, down_bias))
        up, down = weights
        states = self._activated(functional.linear(tokens, up, up_bias))
        return self._finished(functional.linear(states, down, down_bias))

    @property
    def has_silu_gate(self) -> bool:
        """Whether transformers' own gate with a SiLU stands between the products, and nothing after them."""
        module = self._module
        is_default = module.has_gate and type(module)._apply_gate.__module__ == ExpertsInterface.__module__
        return is_default and isinstance(module.act_fn, _SILU) and not _has_norm(module)

    def _activated(self, states: torch.Tensor) -> torch.Tensor:
        """The input of the second product, from the output of the first."""
        module = self._module
        result: torch.Tensor = module._apply_gate(states) if module.has_gate else module.act_fn(states)
        return result

    def _finished(self, states: torch.Tensor) -> torch.Tensor:
        """The output of an expert, from the output of the second product."""
        result: torch.Tensor = self._module.post_expert_norm(states) if _has_norm(self._module) else states
        return result


def expert_modules(model: PreTrainedModel) -> dict[str, Any]:
    """The modules of a model that hold stacked experts in the form of `ExpertLayer`, by name."""
    return {name: module for name, module in model.named_modules() if _is_stack(module)}


def require_experts(model: PreTrainedModel) -> dict[str, Any]:
    """Return `expert_modules`, or raise a `ValueError` that names experts of another form."""
    experts = expert_modules(model)
    if not experts:
        names = {type(module).__name__ for module in model.modules()}
        kinds = sorted(name for name in names if "expert" in name.lower())
        reason = f"{' and '.join(kinds)} are not declared as experts to transformers" if kinds else "it is dense"
        raise ValueError(f"{type(model).__name__} has no experts that could be computed on their own: {reason}.")
    return experts


def _is_stack(module: Any) -> bool:
    noted = ("has_gate", "has_bias")
    if not holds_experts(module) or not all(isinstance(getattr(module, name, None), bool) for name in noted):
        return False
    weights = [module._parameters.get(name) for name in _names_of_products(module)]
    return all(weight is not None and weight.dim() == 3 for weight in weights)


def _names_of_products(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _has_norm(module: Any) -> bool:
    """Whether a norm follows each expert, which transformers declares since its interface takes such experts."""
    return getattr(module, "has_post_expert_norm", False)


def _matrices(weight: torch.Tensor, is_transposed: bool) -> Matrices:
    if isinstance(weight, QuantizedWeight):
        return weight.matrices
    weight = weight.detach()
    return PlainMatrices(weight.transpose(1, 2) if is_transposed else weight)
