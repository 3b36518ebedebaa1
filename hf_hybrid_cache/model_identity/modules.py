"""Classes, attributes and hooks of modules, all that they are beside their tensors; and whose code they run."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..weights import QUANT_METHOD
from .identity import ModelIdentityError, digest_of
from .weights import is_longrope

# Their versions are in an identity.
_OURS = "hf_hybrid_cache"
_KNOWN = {_OURS, "torch", "transformers", "builtins"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# transformers leaves hooks after a pass that returned hidden states, which only read.
_ONLY_READS = "transformers.utils.output_capturing"
# What runs in place of the forward of a class, if a module has it.
_FORWARDS = ("forward", "_compiled_call_impl")
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
    """Return the name of a class with that of its file."""
    return f"{kind.__module__}.{kind.__qualname__}"


def longest_text(model: PreTrainedModel) -> int | None:
    """
    Return up to how many tokens of a text states depend on the tokens before them alone; `None` for any number.

    A forward pass with a later position uses the long factors of longrope, for all of its tokens.
    """
    configs: list[Any] = [module.config for module in model.modules() if is_longrope(module)]
    return min((int(each.rope_parameters["original_max_position_embeddings"]) for each in configs), default=None)


def require_identifiable(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Check that states depend neither on chance nor on other texts."""
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
    if by_length:
        raise ModelIdentityError(
            f"{type(model).__name__} turns keys by the length of the text, and of texts that it read before (rope_type "
            f"{' and '.join(sorted(by_length))}), so states depend on more than the tokens before them. Use a "
            "rope_type that does not, such as yarn."
        )


def require_known_code(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> None:
    """Check that all code of a model is that of torch, transformers and this package, whose versions are compared."""
    if (stranger := next(_strangers(model, modules), None)) is not None:
        raise ModelIdentityError(
            f"{type(model).__name__} runs code of other programs, whose effect cannot be told: {stranger}. Remove it, "
            'or give what it does a name, PrefixStore(path, identity="steering 2.0"), and another name whenever that '
            "changes."
        )


def _strangers(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """List code of other programs, such as "lm_head has a forward hook"."""
    if torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks:
        yield "all modules have a forward hook"
    for name, module in modules.items():
        where = name or "the model"
        if not _is_known(type(module)):
            yield f"{where} is a {name_of_class(type(module))}"
        if _hooks_of(module):
            yield f"{where} has a forward hook"
        for attribute, value in vars(module).items():
            if attribute in _FORWARDS and _package_of(value) != _OURS:
                yield f"{where} has a {attribute} of its own"
            elif callable(value) and not _is_known(value):
                yield f"{attribute} of {where} is of {_package_of(value)}"
    quantizer = getattr(model, "hf_quantizer", None)
    quantization = getattr(quantizer, "quantization_config", None)
    # The quantizer of a GGUF file stays with the weights that it has dequantized.
    if quantizer is not None and getattr(quantization, "quant_method", None) not in (QUANT_METHOD, "gguf"):
        yield f"another library has quantized the weights ({type(quantization).__name__})"
    config: Any = model.config.get_text_config(decoder=True)
    for what, functions, chosen in (
        ("attention", ALL_ATTENTION_FUNCTIONS, config._attn_implementation),
        ("masks of attention", ALL_MASK_ATTENTION_FUNCTIONS, config._attn_implementation),
        ("experts", ALL_EXPERTS_FUNCTIONS, getattr(config, "_experts_implementation", None)),
    ):
        if not _is_known(functions.get(chosen)):
            yield f"the {what} {chosen!r} of {_package_of(functions.get(chosen))}"


def _is_known(code: Any) -> bool:
    return _package_of(code) in _KNOWN


def _package_of(code: Any) -> str:
    """Return the name of the package that a class, a function or the class of an object is of."""
    while isinstance(code, functools.partial):
        code = code.func
    place: str = getattr(code, "__module__", None) or type(code).__module__
    return place.partition(".")[0]


def _hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward hooks that may change something."""
    hooks = (hook for name in _HOOKS for hook in vars(module)[name].values())
    return [hook for hook in hooks if getattr(hook, "__globals__", {}).get("__name__") != _ONLY_READS]


def _form_of(module: nn.Module) -> list[Any]:
    # Those of PEFT say in private which adapters are active; those of transformers say there what they have done.
    counts = not _is_known(type(module))
    plain = {
        name: value
        for name, each in vars(module).items()
        if (counts or name[0] != "_") and name not in _LEFT_OUT and (value := _plain(each)) is not None
    }
    return [name_of_class(type(module)), plain, [_plain(hook) for hook in _hooks_of(module)]]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; `None` for one that is not plain."""
    kind = type(value)
    if kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [_plain(each) for each in value]
    if kind is dict:
        return {str(name): _plain(each) for name, each in value.items()}
    if kind is torch.dtype:
        return str(value)
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    return None
