"""Two layers of a known model, run in one call and by their own forward."""

from dataclasses import replace
from typing import Any

import torch

from ..cache import HybridCache
from ..cache_argument import cache_argument
from .known_models import KnownModel, unknown_step
from .step_plan import StepPlan

_PROMPT = 3
# Relative to all numbers together: weights in full precision are multiplied with other sums than torch's.
_MOST_APART = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def require_alike(known: KnownModel, decoder: Any) -> None:
    """
    Run a step of the first and the last layer both ways, on random states.

    Raises:
        UnknownStepError: the results differ by more than rounding.
    """
    layers = known.layers[:: max(1, len(known.layers) - 1)]
    part = replace(known, layers=layers)
    with torch.no_grad():
        ours, own = (_step(part, decoder, in_one_call) for in_one_call in (True, False))
    apart = (ours.float() - own.float()).norm() / own.float().norm()
    if not apart <= _MOST_APART[own.dtype]:
        raise unknown_step(known.name, f"two of its layers give other results, which differ by {apart:.0e} of all")


def _step(part: KnownModel, decoder: Any, in_one_call: bool) -> torch.Tensor:
    """Run a step of some layers after a short prompt."""
    cache, dtype = HybridCache(decoder.config), decoder.norm.weight.dtype
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, _PROMPT + 1, decoder.config.hidden_size, generator=generator).to(dtype)
    _run_layers(part, decoder, cache, states[:, :-1], torch.arange(_PROMPT)[None])
    positions, last = torch.tensor([[_PROMPT]]), states[:, -1:]
    if not in_one_call:
        out: torch.Tensor = decoder.norm(_run_layers(part, decoder, cache, last, positions))
        return out
    plan = StepPlan(part, rows=1)
    if why_not := plan.take(cache):
        raise unknown_step(part.name, why_not)
    return plan.run(last, *decoder.rotary_emb(last, position_ids=positions))


def _run_layers(
    part: KnownModel, decoder: Any, cache: HybridCache, states: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    angles = decoder.rotary_emb(states, position_ids=positions)
    for index in (layer.index for layer in part.layers):
        states = decoder.layers[index](
            states, attention_mask=None, position_ids=positions, position_embeddings=angles, use_cache=True,
            **cache_argument(cache),
        )  # fmt: skip
    return states
