"""A digest of all that modules say beside the config: their classes, plain attributes, hooks and adapters."""

import functools
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .identity import digest_of
from .weights import digest_of_tensors

# Their versions are in an identity; of other code the source counts.
OUR_VERSIONS = {"hf_hybrid_cache", "torch", "transformers"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ONLY_READS = "transformers.utils.output_capturing"
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


def modules_digest(modules: Mapping[str, nn.Module]) -> str:
    """Return the digest of all modules, by their names."""
    return digest_of([[name, *_form_of(module)] for name, module in modules.items()])


def name_of_class(kind: type) -> str:
    """Return the name of a class, with digests of the sources of it and its bases where no version tells them."""
    return " ".join([kind.__qualname__, *(each or "without source" for each in sources_of(kind).values())])


@functools.cache
def sources_of(kind: type) -> Mapping[str, str | None]:
    """Return digests of the source of a class and its bases by Python module; `None` in a notebook, without a file."""
    told = OUR_VERSIONS | sys.stdlib_module_names | {"builtins"}
    sources: dict[str, str | None] = {}
    for module in (base.__module__ for base in kind.__mro__ if root(base.__module__) not in told):
        try:
            sources[module] = hashlib.blake2b(Path(str(sys.modules[module].__file__)).read_bytes()).hexdigest()
        except (AttributeError, KeyError, OSError):
            sources[module] = None
    return sources


def root(module: str) -> str:
    """Return the name of the package of a Python module."""
    return module.partition(".")[0]


def adapters_of(modules: Mapping[str, Any]) -> str:
    """Return the names of PEFT's adapters in effect, with a digest of how modules use them; "none" without any."""
    uses: dict[str, Any] = {}
    names: set[str] = set()
    for name, module in modules.items():
        # PEFT gives a module with adapters this property. A model of transformers has a method of this name.
        if not isinstance(getattr(type(module), "disable_adapters", None), property):
            continue
        active, is_disabled = module.active_adapter, bool(module.disable_adapters)
        active = [active] if isinstance(active, str) else list(map(str, active))
        merged = list(map(str, getattr(module, "merged_adapters", ())))
        # LoRA has a scaling for each adapter.
        scaling = {str(each): repr(value) for each, value in (getattr(module, "scaling", None) or {}).items()}
        uses[name] = [active, is_disabled, merged, scaling]
        names.update(f"{each} merged" for each in merged)
        names.update(() if is_disabled else set(active).difference(merged))
    return f"{', '.join(sorted(names)) or 'disabled'} ({digest_of(uses)})" if uses else "none"


def _form_of(module: nn.Module) -> list[Any]:
    attributes, kind = vars(module), type(module)
    # Those that torch and transformers keep beside buffers follow from the config; some adapters of PEFT have others.
    with_tensors = root(kind.__module__) not in OUR_VERSIONS
    plain = {
        name: value
        for name, each in attributes.items()
        if not name.startswith("_") and name not in _LEFT_OUT and (value := _plain(each, with_tensors)) is not None
    }
    every_hook = (hook for name in HOOKS for hook in attributes[name].values())
    # What transformers left after a pass that returned hidden states only reads.
    hooks = [hook for hook in every_hook if getattr(hook, "__globals__", {}).get("__name__") != _ONLY_READS]
    return [name_of_class(kind), plain, [_plain(hook) or type(hook).__qualname__ for hook in hooks]]


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
        return digest_of_tensors({"": value.detach()})
    if kind is torch.dtype:
        return str(value)
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    return None
