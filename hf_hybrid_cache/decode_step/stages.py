"""The stages of a decoder: its layers, and what follows them. Its own forward runs with others in their places."""

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..cache import HybridCache
from ..cache_argument import cache_argument

# What a stage is called with: its number, its module, its arguments and those by name.
CallOfStage = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


CallOfModule = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class _StandIn(nn.Module):
    """Stands for a module that is called as `call` says; has the attributes of the module."""

    def __init__(self, module: nn.Module, call: CallOfModule):
        super().__init__()
        vars(self).update(_stood_for=module, _call_of=call)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stood_for"], name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call_of(self._stood_for, args, options)


class Stages:
    """
    A decoder whose stages are called in another way. It holds the modules of the decoder, and not the decoder.

    Args:
        decoder: whose forward runs.
        call: calls a stage.
        names: of the children that are stages once a layer was called, see `stage_names`.
        call_before: calls these children before that.
    """

    def __init__(self, decoder: Any, call: CallOfStage, names: Iterable[str], call_before: CallOfModule | None = None):
        self._call, self._call_before, self._forward = (
            call,
            call_before or call_module,
            undecorated(type(decoder).forward),
        )
        self._number = 0
        children, layers = dict(decoder._modules), layers_of(decoder)
        for name in names:
            child = children[name]
            if child is layers:
                children[name] = nn.ModuleList(_StandIn(layer, self._call_stage) for layer in layers)
            elif child is not None and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                children[name] = _StandIn(child, self._call_other)
        self._copy = copy.copy(decoder)
        vars(self._copy)["_modules"] = children
        vars(self._copy).pop("forward", None)

    def run(self, cache: HybridCache, **given: Any) -> Any:
        """Run the forward of the decoder with a cache; return what it returns."""
        self._number = 0
        return self._forward(self._copy, use_cache=True, **given, **cache_argument(cache))

    def _call_stage(self, module: nn.Module, args: Any, options: Any) -> Any:
        self._number += 1
        return self._call(self._number - 1, module, args, options)

    def _call_other(self, module: nn.Module, args: Any, options: Any) -> Any:
        return (self._call_stage if self._number else self._call_before)(module, args, options)


class _AtLayersError(Exception):
    """A forward pass has come to its layers."""


def stage_names(decoder: Any) -> tuple[str, ...]:
    """
    The names of children that are stages, or hold them: all that are not called before the first layer.

    A pass runs until there. What it calls, embeddings and positions, is not a part of the step.
    """
    called: list[nn.Module] = []

    def note(module: nn.Module, args: Any, options: Any) -> Any:
        called.append(module)
        return module(*args, **options)

    def end(*_: Any) -> None:
        raise _AtLayersError

    stages = Stages(decoder, end, decoder._modules, note)
    with torch.no_grad(), contextlib.suppress(_AtLayersError):
        stages.run(HybridCache(decoder.config), input_ids=random_tokens(decoder, 1, 1))
    return tuple(name for name, child in decoder._modules.items() if not any(child is each for each in called))


def layers_of(decoder: nn.Module) -> nn.ModuleList | None:
    """The layers of a decoder: the longest list among its children."""
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    return max(lists, key=len, default=None)


def undecorated(function: Any) -> Any:
    """A function without the decorators of transformers."""
    while hasattr(function, "__wrapped__") and function.__globals__["__name__"].startswith("transformers."):
        function = function.__wrapped__
    return function


def call_module(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a module as it is."""
    return module(*args, **options)


def run_own(decoder: Any, cache: HybridCache, tokens: torch.Tensor) -> torch.Tensor:
    """Run the decoder's own forward; return its states."""
    stages = Stages(decoder, lambda stage, *call: call_module(*call), ())
    states: torch.Tensor = stages.run(cache, input_ids=tokens)[0]
    return states


def random_tokens(decoder: Any, rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Tokens that a decoder knows, `[rows, tokens]`."""
    most = decoder.get_input_embeddings().weight.shape[0]
    return torch.randint(most, (rows, tokens), generator=torch.Generator().manual_seed(seed))
