"""Models whose states depend on what cannot be told: code of other programs, training, the length of the text."""

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

from ..weights import QUANT_METHOD
from .identity import ModelIdentityError
from .modules import HOOKS, OUR_VERSIONS, root, sources_of
from .weights import ELSEWHERE, is_longrope

# What they hang on a model follows from its config, its adapters and its place.
_HELPERS = {"accelerate", "peft"}
# Libraries whose functions modules of transformers call.
_CALLED = {"causal_conv1d", "einops", "fla", "flash_attn", "kernels", "mamba_ssm", "numpy", "torchvision", "triton"}
_KNOWN = OUR_VERSIONS | _HELPERS | _CALLED | sys.stdlib_module_names | {"builtins"}
_OF_TORCH = frozenset(vars(nn.Module()))
_CODE_OF_CLASSES = (FunctionType, functools.partial, staticmethod, classmethod, property)
_CACHED = type(functools.cache(lambda: None))


def longest_text(model: PreTrainedModel) -> int | None:
    """
    Return up to how many tokens of a text states depend on the tokens before them alone; `None` for any number.

    A forward pass with a later position uses the long factors of longrope, for all of its tokens.
    """
    configs: list[Any] = [module.config for module in model.modules() if is_longrope(module)]
    return min((int(each.rope_parameters["original_max_position_embeddings"]) for each in configs), default=None)


def require_identifiable(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Check everything but code and weights: training mode, quantization by other libraries, rotations by length."""
    by_length: set[str] = set()
    for module in modules:
        if module.training:
            raise ModelIdentityError(
                f"{type(model).__name__} is in training mode, in which dropout changes the states at random. Call "
                "model.eval() first."
            )
        kind = vars(module).get("rope_type")
        names = kind.values() if isinstance(kind, dict) else [] if is_longrope(module) else [kind]
        by_length.update(name for name in names if isinstance(name, str) and ("dynamic" in name or name == "longrope"))
    quantizer = getattr(model, "hf_quantizer", None)
    quantization = getattr(quantizer, "quantization_config", None)
    # The quantizer of a GGUF file stays with the weights that it has dequantized.
    if quantizer is not None and getattr(quantization, "quant_method", None) not in (QUANT_METHOD, "gguf"):
        raise ModelIdentityError(
            f"{type(model).__name__} was quantized by another library ({type(quantization).__name__}), {ELSEWHERE}"
        )
    if by_length:
        raise ModelIdentityError(
            f"{type(model).__name__} turns keys by the length of the text, and of texts that it read before (rope_type "
            f"{' and '.join(sorted(by_length))}), so states depend on more than the tokens before them. Use a "
            "rope_type that does not, such as yarn."
        )


def require_known_code(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> None:
    """Check that what a model computes can be told from its classes, attributes and weights."""
    if (unknown := next(_unknown_code(model, modules), None)) is not None:
        raise ModelIdentityError(
            f"{type(model).__name__} runs code whose effect cannot be told: {unknown}. Remove it, or give what it does "
            'a name, PrefixStore(path, identity="steering 2.0"), and another name whenever that changes.'
        )


def _unknown_code(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """List what runs beside the code of classes and known libraries, such as "a forward hook of lm_head"."""
    classes = list(dict.fromkeys(base for module in modules.values() for base in type(module).__mro__))
    own = {name: digest for kind in classes for name, digest in sources_of(kind).items()}
    yield from (f"a class of {name}, which has no file of source" for name in sorted(own) if own[name] is None)
    of_model = {id(module) for module in modules.values()}
    # A hook in the file of a model's class may read what that file's functions set.
    for found, known in ((_hooks(modules), set()), (_code(model, modules, classes), set(own))):
        seen: dict[int, Any] = {}
        for what, value in found:
            if (stranger := _stranger_in(value, of_model, known, seen)) is not None:
                yield f"{what} ({stranger})"


def _hooks(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """List the forward hooks, with what they are."""
    of_all = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    places: list[tuple[str, Mapping[int, Any]]] = [("all modules", hooks) for hooks in of_all]
    places += [(name or "the model", vars(module)[kind]) for name, module in modules.items() for kind in HOOKS]
    return ((f"a forward hook of {place}", hook) for place, hooks in places for hook in hooks.values())


def _code(model: PreTrainedModel, modules: Mapping[str, nn.Module], classes: list[type]) -> Iterator[tuple[str, Any]]:
    """List attributes, the functions of classes, those that these call by name, and those that the config chooses."""
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if attribute not in _OF_TORCH:
                yield f"{attribute} of {name or 'the model'}", value
    for kind in classes:
        for name, value in vars(kind).items():
            if isinstance(value, _CODE_OF_CLASSES):
                yield f"{kind.__qualname__}.{name}", value
    for place in {kind.__module__ for kind in classes if kind.__module__.startswith("transformers.models.")}:
        for name, value in vars(sys.modules[place]).items():
            # torch.compile leaves what it made of a module's functions among them, for any model of the process.
            if isinstance(value, FunctionType | functools.partial) and not name.startswith("__compiled_fn_"):
                yield f"{place}.{name}", value
    config: Any = model.config.get_text_config(decoder=True)
    attention, experts = config._attn_implementation, getattr(config, "_experts_implementation", None)
    yield f"the attention {attention!r}", ALL_ATTENTION_FUNCTIONS.get(attention)
    yield f"the masks of attention {attention!r}", ALL_MASK_ATTENTION_FUNCTIONS.get(attention)
    yield f"the experts {experts!r}", ALL_EXPERTS_FUNCTIONS.get(experts)


def _stranger_in(value: Any, of_model: set[int], own: set[str], seen: dict[int, Any]) -> str | None:
    """Return what is neither known nor of the model (modules by id) or its files (Python modules by name)."""
    if id(value) in seen:
        return None
    seen[id(value)] = value  # its id counts as long as it lives
    if isinstance(value, nn.Module):
        return None if id(value) in of_model else f"the {type(value).__qualname__} is no part of the model"
    if isinstance(value, FunctionType):
        # `functools.wraps` changes the other names of a function.
        place = value.__globals__.get("__name__", "no module")
    elif isinstance(value, type | BuiltinFunctionType):
        place = value.__module__ or "builtins"
    elif isinstance(value, PreTrainedConfig | ModuleType):
        place = "builtins"
    elif root(place := type(value).__module__) not in _KNOWN:
        return f"an object of {type(value).__qualname__} in {place}"
    if root(place) not in _KNOWN and place not in own:
        return f"{value.__qualname__} in {place}"
    behind = (_stranger_in(each, of_model, own, seen) for each in _behind(value))
    return next((stranger for stranger in behind if stranger is not None), None)


def _behind(value: Any) -> Iterator[Any]:
    """List the values that a value refers to, as far as they say what it does."""
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, torch.Tensor | type):
        return
    elif root(type(value).__module__) in _HELPERS:
        yield from getattr(value, "__dict__", {}).values()
    elif hasattr(type(value), "__wrapped__") or isinstance(value, _CACHED):
        yield value.__wrapped__
