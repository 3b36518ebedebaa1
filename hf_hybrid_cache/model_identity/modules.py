"""A digest of a model's modules: their classes, plain attributes and hooks, which the config need not tell."""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .digests import canonical, digest_of

# Their version, or ours, is in an identity, or does not matter; of other code the source counts.
_LIBRARIES = {"hf_hybrid_cache", "torch", "transformers"}
# What no state depends on.
_LEFT_OUT = {
    "all_tied_weights_keys",
    "gradient_checkpointing",
    "hf_device_map",
    "is_quantized",
    "kernel_config",
    "loss_type",
    "name_or_path",
    "quantization_method",
    "training",
    "warnings_issued",
}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def modules_digest(modules: Mapping[str, nn.Module]) -> str:
    """Return the digest of all modules, by their names."""
    return digest_of(canonical([[name, *_form_of(module)] for name, module in modules.items()]))


def name_of_class(kind: type) -> str:
    """Return the name of a class, with a digest of its module's source if it is none of torch or transformers."""
    is_known = kind.__module__.partition(".")[0] in _LIBRARIES
    return kind.__qualname__ if is_known else f"{kind.__qualname__} {_source_digest(kind.__module__)}"


@functools.cache
def _source_digest(module: str) -> str:
    try:
        return digest_of(Path(str(sys.modules[module].__file__)).read_bytes())
    except (AttributeError, KeyError, OSError):  # as in a notebook
        return "without source"


def _form_of(module: nn.Module) -> list[Any]:
    attributes = vars(module)
    plain = {
        name: value
        for name, each in attributes.items()
        if not name.startswith("_") and name not in _LEFT_OUT and (value := _plain(each)) is not None
    }
    hooks = [_plain(hook) or type(hook).__qualname__ for name in _HOOKS for hook in attributes[name].values()]
    return [name_of_class(type(module)), plain, hooks]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; `None` for one that is not plain, such as a tensor."""
    kind = type(value)
    if kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [_plain(each) for each in value]
    if kind is dict:
        return {str(name): _plain(each) for name, each in value.items()}
    if kind is torch.dtype:
        return str(value)
    if isinstance(value, _FUNCTIONS):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    return None
