"""The stages of a decoder: its layers, and what follows them. Its own forward runs with others in their places."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..cache import HybridCache
from ..cache_argument import cache_argument
from ..errors import HybridCacheError

# Calls a stage: its number, its module, its arguments and those by name.
CallOfStage = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
CallOfModule = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class _Pass:
    """
    A forward pass that comes to one stage after the other. What stands for them knows it, and not the decoder.

    Attributes:
        call: calls a stage.
        call_before: calls the children that are stages only once a layer was called.
        number: of the next stage.
    """

    call: CallOfStage | None = None
    call_before: CallOfModule
    number = 0

    def to_stage(self, module: nn.Module, args: Any, options: Any) -> Any:
        assert self.call is not None
        self.number += 1
        return self.call(self.number - 1, module, args, options)

    def to_other(self, module: nn.Module, args: Any, options: Any) -> Any:
        return (self.to_stage if self.number else self.call_before)(module, args, options)


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
        names: of the children that are stages once a layer was called, see `stage_names`.
    """

    def __init__(self, decoder: Any, names: Iterable[str]):
        self._forward, self._pass = undecorated(type(decoder).forward), _Pass()
        children, layers = dict(decoder._modules), layers_of(decoder)
        for name in names:
            child = children[name]
            if child is layers:
                children[name] = nn.ModuleList(_StandIn(layer, self._pass.to_stage) for layer in layers)
            elif child is not None and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                children[name] = _StandIn(child, self._pass.to_other)
        self._copy = copy.copy(decoder)
        vars(self._copy)["_modules"] = children
        vars(self._copy).pop("forward", None)

    def run(self, cache: HybridCache, call: CallOfStage, call_before: CallOfModule | None = None, **given: Any) -> Any:
        """
        Run the forward of the decoder; return what it returns.

        Args:
            cache: of the decoder.
            call: calls a stage.
            call_before: calls the children that are stages only once a layer was called; `None` for as they are.
            given: further arguments of the decoder.
        """
        self._pass.number, self._pass.call, self._pass.call_before = 0, call, call_before or call_module
        try:
            return self._forward(self._copy, use_cache=True, **given, **cache_argument(cache))
        finally:
            self._pass.call = None


class _AtLayersError(HybridCacheError, RuntimeError):
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

    stages = Stages(decoder, decoder._modules)
    with torch.no_grad(), contextlib.suppress(_AtLayersError):
        stages.run(new_cache(decoder.config), end, note, input_ids=random_tokens(decoder, 1, 1))
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


def run_own(decoder: Any, cache: HybridCache, **given: Any) -> torch.Tensor:
    """Run the decoder's own forward with further arguments; return its states."""
    states: torch.Tensor = Stages(decoder, ()).run(cache, lambda *_: None, **given)[0]
    return states


def new_cache(config: PreTrainedConfig) -> HybridCache:
    """A cache in full precision, made without a warning that it changes nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return HybridCache(config)


def random_tokens(decoder: Any, rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Tokens that a decoder knows, `[rows, tokens]`."""
    most = decoder.get_input_embeddings().weight.shape[0]
    return torch.randint(most, (rows, tokens), generator=torch.Generator().manual_seed(seed))
