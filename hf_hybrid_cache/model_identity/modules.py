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
from .tensor_digests import tensor_digests

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
    return kind.__qualname__ if _is_known(kind) else f"{kind.__qualname__} {_source_digest(kind.__module__)}"


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


@functools.cache
def _source_digest(module: str) -> str:
    try:
        return digest_of(Path(str(sys.modules[module].__file__)).read_bytes())
    except (AttributeError, KeyError, OSError):  # as in a notebook
        return "without source"


def _form_of(module: nn.Module) -> list[Any]:
    attributes, kind = vars(module), type(module)
    # Those that torch and transformers keep beside buffers follow from the config; some adapters of PEFT have others.
    with_tensors = not _is_known(kind)
    plain = {
        name: value
        for name, each in attributes.items()
        if not name.startswith("_") and name not in _LEFT_OUT and (value := _plain(each, with_tensors)) is not None
    }
    hooks = [_plain(hook) or type(hook).__qualname__ for name in _HOOKS for hook in attributes[name].values()]
    return [name_of_class(kind), plain, hooks]


def _plain(value: Any, with_tensors: bool = False) -> Any:
    """Return a value as JSON has it, perhaps the digest of a tensor; `None` for one that is not plain."""
    kind = type(value)
    if kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [_plain(each, with_tensors) for each in value]
    if kind is dict:
        return {str(name): _plain(each, with_tensors) for name, each in value.items()}
    if kind is torch.Tensor and with_tensors and not value.is_meta and value.layout == torch.strided:
        return [str(value.dtype), *value.shape, digest_of(b"".join(tensor_digests([value.detach()])))]
    if kind is torch.dtype:
        return str(value)
    if isinstance(value, _FUNCTIONS):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    return None
