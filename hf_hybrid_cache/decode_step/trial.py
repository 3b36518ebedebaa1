"""Layers of a known model, run in one call and by the model's own forward."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..cache import HybridCache
from ..cache_argument import cache_argument
from .known_models import KnownModel, undecorated, unknown_step
from .step_plan import StepPlan

_PROMPT = 3
# Relative to all numbers together: weights in full precision are multiplied with other sums than torch's.
_MOST_APART = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Attributes that every module has.
_OF_ALL = vars(nn.Module()).keys()


def require_alike(known: KnownModel, decoder: Any) -> None:
    """
    Run a step both ways, on random states: of the first layer, the last, and one of each kind between.

    Raises:
        UnknownStepError: the results differ by more than rounding, or the model's own forward fails.
    """
    kinds = {_kind(layer): index for index, layer in reversed([*enumerate(decoder.layers[: len(known.layers)])])}
    indices = sorted({*kinds.values(), len(known.layers) - 1})
    part = replace(known, layers=tuple(known.layers[index] for index in indices))
    try:
        with torch.no_grad():
            ours, own = (_step(part, decoder, in_one_call) for in_one_call in (True, False))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise unknown_step(known.name, f"a trial of its layers ends with {type(error).__name__}: {error}") from error
    apart = (ours.float() - own.float()).norm() / own.float().norm()
    if not apart <= _MOST_APART[own.dtype]:
        raise unknown_step(known.name, f"some of its layers give other results, which differ by {apart:.0e} of all")


def _kind(layer: nn.Module) -> Any:
    """Return all that a layer has beside its weights and its number: settings by value, objects by identity."""
    return tuple(
        (type(module), name, value if isinstance(value, (float, int, str)) else id(value))
        for module in layer.modules()
        for name, value in vars(module).items()
        if name not in _OF_ALL and name != "layer_idx"
    )


def _step(part: KnownModel, decoder: Any, in_one_call: bool) -> torch.Tensor:
    """Run a step of some layers after a short prompt."""
    cache, dtype = HybridCache(decoder.config), decoder.norm.weight.dtype
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, _PROMPT + 1, decoder.config.hidden_size, generator=generator).to(dtype)
    layers = nn.ModuleList([decoder.layers[layer.index] for layer in part.layers])
    of_layers = copy.copy(decoder)
    vars(of_layers)["_modules"] = {**decoder._modules, "layers": layers}

    def run(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        forward, options = undecorated(type(decoder).forward), {"use_cache": True, **cache_argument(cache)}
        out: torch.Tensor = forward(of_layers, inputs_embeds=states, position_ids=positions, **options)[0]
        return out

    run(states[:, :-1], torch.arange(_PROMPT)[None])
    positions, last = torch.tensor([[_PROMPT]]), states[:, -1:]
    if not in_one_call:
        return run(last, positions)
    plan = StepPlan(part, rows=1)
    if why_not := plan.take(cache):
        raise unknown_step(part.name, why_not)
    return plan.run(last, *decoder.rotary_emb(last, position_ids=positions))
