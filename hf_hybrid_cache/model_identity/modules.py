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
from .hashed_tensors import tensor_digests

# Their versions are in an identity; of other code the source counts.
OUR_VERSIONS = {"hf_hybrid_cache", "torch", "transformers"}
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
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def modules_digest(modules: Mapping[str, nn.Module]) -> str:
    """Return the digest of all modules, by their names."""
    return digest_of(canonical([[name, *_form_of(module)] for name, module in modules.items()]))


def name_of_class(kind: type) -> str:
    """Return the name of a class, with digests of the sources of it and its bases where no version tells them."""
    return " ".join([kind.__qualname__, *(source_digest(each) or "without source" for each in own_modules(kind))])


def own_modules(kind: type) -> list[str]:
    """List the Python modules of a class and its bases whose source counts, as no version in an identity tells it."""
    told = OUR_VERSIONS | sys.stdlib_module_names | {"builtins"}
    modules = dict.fromkeys(base.__module__ for base in kind.__mro__)
    return [module for module in modules if module.partition(".")[0] not in told]


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in OUR_VERSIONS


@functools.cache
def source_digest(module: str) -> str | None:
    """Return the digest of the source of a Python module; `None` where there is no file, as in a notebook."""
    try:
        return digest_of(Path(str(sys.modules[module].__file__)).read_bytes())
    except (AttributeError, KeyError, OSError):
        return None


def _form_of(module: nn.Module) -> list[Any]:
    attributes, kind = vars(module), type(module)
    # Those that torch and transformers keep beside buffers follow from the config; some adapters of PEFT have others.
    with_tensors = not _is_known(kind)
    plain = {
        name: value
        for name, each in attributes.items()
        if not name.startswith("_") and name not in _LEFT_OUT and (value := _plain(each, with_tensors)) is not None
    }
    hooks = [hook for name in HOOKS for hook in attributes[name].values() if not _only_reads(hook)]
    return [name_of_class(kind), plain, [_plain(hook) or type(hook).__qualname__ for hook in hooks]]


def _only_reads(hook: Any) -> bool:
    """Return whether transformers left a hook after a pass that returned hidden states."""
    return isinstance(hook, FunctionType) and hook.__globals__.get("__name__") == "transformers.utils.output_capturing"


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
