"""Code that a model runs and whose effect cannot be told: hooks, patched functions, and objects of other programs."""

import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .modules import HOOKS, OUR_VERSIONS, own_modules, source_digest

# What they hang on a model follows from its config, its adapters and its place.
_HELPERS = {"accelerate", "peft"}
# Libraries whose functions modules of transformers call.
_CALLED = {"causal_conv1d", "einops", "fla", "flash_attn", "kernels", "mamba_ssm", "numpy", "torchvision", "triton"}
_KNOWN = OUR_VERSIONS | _HELPERS | _CALLED | sys.stdlib_module_names | {"builtins"}
_OF_TORCH = frozenset(vars(nn.Module()))


def unknown_code(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> str | None:
    """
    Return what a model runs beside the code of its classes and known libraries, such as "a forward hook of lm_head".

    Args:
        model: of transformers.
        modules: all of its modules, by name.
    """
    classes = {base: None for module in modules.values() for base in type(module).__mro__}
    own = {name for kind in classes for name in own_modules(kind)}
    if missing := sorted(name for name in own if source_digest(name) is None):
        return f"a class of {missing[0]}, which has no file of source"
    of_model = {id(module) for module in modules.values()}
    # A hook in the file of a model's class may read what that file's functions set.
    hooks, code = _Known(of_model, set()), _Known(of_model, own)
    found = (
        *((what, hooks.stranger_in(hook)) for what, hook in _hooks(modules)),
        *((what, code.stranger_in(value)) for what, value in _attributes(modules)),
        *((what, code.stranger_in(value)) for what, value in _functions_of(classes)),
        *((what, code.stranger_in(value)) for what, value in _chosen_functions(model)),
    )
    return next((f"{what} ({stranger})" for what, stranger in found if stranger is not None), None)


def _hooks(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):
        yield from (("a forward hook of all modules", hook) for hook in hooks.values())
    for name, module in modules.items():
        for kind in HOOKS:
            yield from ((f"a forward hook of {name or 'the model'}", hook) for hook in vars(module)[kind].values())


def _attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if attribute not in _OF_TORCH:
                yield f"{attribute} of {name or 'the model'}", value


def _functions_of(classes: Iterable[type]) -> Iterator[tuple[str, Any]]:
    """List the functions of classes, and those that their modules call by name."""
    for kind in classes:
        for name, value in vars(kind).items():
            for each in _parts_of(value):
                yield f"{kind.__qualname__}.{name}", each
    for module in {kind.__module__ for kind in classes if kind.__module__.startswith("transformers.models.")}:
        for name, value in vars(sys.modules[module]).items():
            if isinstance(value, FunctionType | functools.partial):
                yield f"{module}.{name}", value


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if each is not None]
    return [value] if isinstance(value, FunctionType | functools.partial) else []


def _chosen_functions(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """List the functions that the config chooses by name."""
    config: Any = model.config.get_text_config(decoder=True)
    attention, experts = config._attn_implementation, getattr(config, "_experts_implementation", None)
    yield f"the attention {attention!r}", ALL_ATTENTION_FUNCTIONS.get(attention)
    yield f"the masks of attention {attention!r}", ALL_MASK_ATTENTION_FUNCTIONS.get(attention)
    yield f"the experts {experts!r}", ALL_EXPERTS_FUNCTIONS.get(experts)


class _Known:
    """
    Tells values that are known from those that are not.

    Args:
        of_model: ids of the model's modules.
        own: names of Python modules whose source is in the identity.
    """

    def __init__(self, of_model: set[int], own: set[str]):
        self._of_model, self._own = of_model, own
        self._seen: dict[int, Any] = {}  # they live as long as their ids count

    def stranger_in(self, value: Any) -> str | None:
        """Return the first code or object in a value, or behind it, that is not known."""
        if id(value) in self._seen:
            return None
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            return None if id(value) in self._of_model else f"the {type(value).__qualname__} is no part of the model"
        if (stranger := self._itself(value)) is not None:
            return stranger
        return next((stranger for each in _behind(value) if (stranger := self.stranger_in(each)) is not None), None)

    def _itself(self, value: Any) -> str | None:
        if isinstance(value, FunctionType):
            # `functools.wraps` changes the other names of a function.
            place = value.__globals__.get("__name__", "no module")
        elif isinstance(value, type | BuiltinFunctionType):
            place = value.__module__ or "builtins"
        elif isinstance(value, PreTrainedConfig | ModuleType):
            return None
        else:
            place = type(value).__module__
            return None if _is_known(place) else f"an object of {type(value).__qualname__} in {place}"
        return None if _is_known(place) or place in self._own else f"{value.__qualname__} in {place}"


def _behind(value: Any) -> Iterator[Any]:
    """List the values that a value refers to, as far as they say what it does."""
    if isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, torch.Tensor | type):
        return
    elif _root(type(value).__module__) in _HELPERS:
        yield from getattr(value, "__dict__", {}).values()
    elif hasattr(type(value), "__wrapped__") or isinstance(value, _CACHED):
        yield value.__wrapped__


_CACHED = type(functools.cache(lambda: None))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_known(place: str) -> bool:
    return _root(place) in _KNOWN


def _root(place: str) -> str:
    return place.partition(".")[0]
