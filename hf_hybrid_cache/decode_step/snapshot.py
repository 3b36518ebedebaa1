"""A note of all that the layers of a decoder compute with, by which a change is seen before each step."""

import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache import HybridCache
from ..layers import HybridLayer
from ..weights import QuantizedWeight

# Functions of attention and of masks by the name that a config has for them.
REGISTRIES = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
# How far functions are followed that a forward calls.
_DEPTH = 2
# A function of another package, or of a program, is somebody's patch.
_PACKAGES = {"torch", "transformers", __name__.partition(".")[0], *sys.stdlib_module_names}
_form = attrgetter("shape", "dtype")


class Snapshot:
    """
    All that the layers of a decoder compute with at one time: what they hold, and the functions that they use.

    It notes the type and all attributes of each module, the slots of parameters, buffers and hooks among them, with
    what is in dictionaries and lists there; where each tensor is, and its shape; the config; all attributes of the
    classes of modules and of the cache; and what their code, that of attention and of masks finds by global names.
    Embeddings and positions are left out: a step calls them as they are.

    Args:
        decoder: the decoder.
        names: of its children that are stages of a step, or hold them.

    Attributes:
        foreign: a function that is neither torch's nor transformers' nor of the model's file, or `None`.
    """

    def __init__(self, decoder: nn.Module, names: Iterable[str]):
        # Not the decoder itself: its own attribute would keep it alive.
        children = (decoder._modules[name] for name in names)
        modules = [module for child in children if child is not None for module in child.modules()]
        kinds = dict.fromkeys([type(decoder), *map(type, modules)])
        name = getattr(getattr(decoder, "config", None), "_attn_implementation", None)
        chosen = [registry[name] for registry in REGISTRIES if name in registry]
        roots = [*_methods(kinds), *chosen]
        self._spaces, self._names, found = _used(roots)
        homes = {*_PACKAGES, *(base.__module__ for kind in kinds for base in kind.__mro__)}
        functions = (function for value in (*roots, *found) for function in _functions_in(value))
        self.foreign = next((each for each in functions if not _is_from(each, homes)), None)

        self._objects, self._containers, self._empty = [*modules, *REGISTRIES], list[Any](), list[Any]()
        self._tensors: list[torch.Tensor] = []
        classes = dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in (*kinds, HybridCache, HybridLayer)))
        owners = decoder, *self._objects, *map(type, REGISTRIES), *classes
        self._note([*map(vars, owners), *found], set())
        # While they are held, nothing else comes to their addresses.
        self._held = self._holds(decoder)
        assert {*map(id, self._visible())} <= {*map(id, self._held)}, "the garbage collector does not see all"
        self._before = self._state(self._held)

    def holds(self, decoder: nn.Module) -> bool:
        """Return whether everything still is the same object, and every tensor where it was."""
        return not any(self._empty) and self._state(self._holds(decoder)) == self._before

    def _note(self, values: Iterable[Any], noted: set[int]) -> None:
        """Note the containers and tensors among some values, and those within."""
        for value in values:
            held = vars(value) if isinstance(value, (PreTrainedConfig, torch.Tensor)) else value
            if isinstance(held, MappingProxyType):
                [held] = gc.get_referents(held)
            if isinstance(value, torch.Tensor) and _has_memory(value):
                self._tensors.append(value)
            if id(held) not in noted and isinstance(held, (dict, list, set)):
                noted.add(id(held))
                (self._containers if held else self._empty).append(held)
                self._objects += [value] * isinstance(value, PreTrainedConfig)
                self._note(_within(held), noted)

    def _visible(self) -> Iterator[Any]:
        """The classes of objects, and all that is in containers."""
        return chain(map(type, self._objects), chain.from_iterable(map(_within, self._containers)))

    def _holds(self, decoder: nn.Module) -> list[Any]:
        """The objects that objects, containers and global names hold, without a loop in Python."""
        named = map(dict.get, self._spaces, self._names)
        return [*gc.get_referents(decoder, *self._objects, *self._containers), *named]

    def _state(self, held: list[Any]) -> Any:
        """The addresses of what is held, so that an equal object is another one; and the places of tensors."""
        return (
            np.fromiter(held, object, len(held)).tobytes(),
            [*map(len, self._containers)],
            [*map(torch.Tensor.data_ptr, self._tensors)],
            [*map(torch.Tensor.stride, self._tensors)],
            [*map(_form, self._tensors)],
        )


def _within(container: Any) -> list[Any]:
    return [*(container.values() if isinstance(container, dict) else container)]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is numbers at an address, as quantized weights and tensors of torch.func are not."""
    with contextlib.suppress(RuntimeError):
        return not isinstance(tensor, QuantizedWeight) and tensor.data_ptr() is not None
    return False


def _methods(kinds: Iterable[Any]) -> Iterator[Any]:
    """The functions of modules that a pass calls, and the methods that these call."""
    for kind in kinds:
        for method in (kind.forward, kind.__call__):
            yield method
            for function in _functions_in(method):
                yield from (getattr(kind, name, None) for name in _names_in(function.__code__))


def _used(values: Iterable[Any]) -> tuple[list[dict[str, Any]], list[str], list[Any]]:
    """Find what functions, and those that they call, use by global names; return spaces, names and what is there."""
    used: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    seen: set[Any] = set()
    for _ in range(_DEPTH + 1):
        functions = {function for value in values for function in _functions_in(value)} - seen
        seen |= functions
        values = []
        for function in functions:
            names, spaces = _names_in(function.__code__), [function.__globals__]
            for space in spaces:
                for name in names & space.keys():
                    value = space[name]
                    used[id(space), name] = space, name, value
                    values.append(value)
                    if isinstance(value, ModuleType) and not any(vars(value) is each for each in spaces):
                        spaces.append(vars(value))
    found = [*used.values()]
    return [space for space, _, _ in found], [name for _, name, _ in found], [value for _, _, value in found]


def _functions_in(value: Any, seen: tuple[Any, ...] = ()) -> Iterator[FunctionType]:
    """A function, and those that it wraps."""
    if isinstance(value, FunctionType) and value not in seen:
        yield value
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # of a cell that nothing was put into yet
                yield from _functions_in(cell.cell_contents, (*seen, value))


def _names_in(code: CodeType) -> set[str]:
    """The names that code looks up, and that within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _is_from(function: FunctionType, homes: set[str]) -> bool:
    """Whether a function is of some packages or files; what a decorator has copied to it does not count."""
    name = str(function.__globals__.get("__name__"))
    return name in homes or name.partition(".")[0] in homes
