"""The fields of an identity, read from a model and a cache, and the checks that they say all."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from inspect import signature
from itertools import product
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache import HybridCache
from ..codecs import describe, weights_of
from ..kernels.vector import processor
from ..layers import HybridLayer
from ..scalars import ranges_text
from ..weights import QUANT_METHOD
from .identity import RANK, Identity, ModelIdentityError, digest_of
from .weights import digest_of_tensors, is_longrope, stored_tensors

# Raise it when an identity means something else.
_FORMAT = 4
# Raise it when kernels or codecs give other results than before: states that were kept are then read again.
NUMBERS = 9
# Settings of a config: where a model comes from, how it is loaded, and what it returns beside states. The type and the
# weights themselves are read from the model.
_LEFT_OUT = {
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "id2label",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Their versions are in an identity.
_OURS = "hf_hybrid_cache"
_KNOWN = {_OURS, "torch", "transformers", "builtins"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# transformers leaves hooks after a pass that returned hidden states, which only read.
_ONLY_READS = "transformers.utils.output_capturing"
# What runs in place of the forward of a class, if a module has it.
_FORWARDS = ("forward", "_compiled_call_impl")
# Attributes of modules that no state depends on.
_NOT_COMPARED = {
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


def identity_of(model: PreTrainedModel, cache: HybridCache, name: str | None = None) -> Identity:
    """
    Return what the states that a model stores in a cache depend on, beside the tokens.

    Each call reads all weights, as fast as memory is read: torch does not count writes through `weight.data`, so
    nothing proves that they are as they were. What code of other programs does cannot be read: a model that has modules
    of other classes than those of torch, transformers and this package, hooks, or modules with a forward of their own,
    needs a name. A function of these packages that somebody has replaced is not seen.

    It is no protection from somebody who wants two models to have the same identity.

    Args:
        model: in evaluation mode, with all of its weights in memory.
        cache: which it will use; what is stored in it does not matter.
        name: of what other programs' code does in the model, such as "steering 2.0".

    Raises:
        TypeError: `model` is no model of transformers, such as the wrapper of PEFT, or `cache` is not one of ours.
        ModelIdentityError: the model is in training mode, some weights are not in memory, its states depend on texts
            that it read before, or it has no name and runs code of other programs.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a model of transformers, got {type(model).__name__}. Pass the one in a wrapper, such as "
            "model.get_base_model() of PEFT: its layers have the adapters. The virtual tokens of prompt and prefix "
            "tuning are not in it, so with them no prompt can be kept."
        )
    if not isinstance(cache, HybridCache):
        raise TypeError(f"cache must be one of hf_hybrid_cache, got {type(cache).__name__}.")
    modules = dict(model.named_modules())
    _require_identifiable(model, modules.values())
    if name is None:
        _require_known_code(model, modules)
    return Identity((*_fields(model, modules, cache), *([] if name is None else [("identity", name)])))


def _fields(model: PreTrainedModel, modules: Mapping[str, nn.Module], cache: HybridCache) -> Iterator[tuple[str, str]]:
    tensors = stored_tensors(model, modules)
    text = model.config.get_text_config(decoder=True)
    is_autocast = torch.is_autocast_enabled(model.device.type)
    autocast = f", autocast to {torch.get_autocast_dtype(model.device.type)}" if is_autocast else ""
    devices = {each.data.device.type for each in tensors if not each.stays_in_host_memory}
    layers = (index for index, layer in enumerate(cache.layers) if isinstance(layer, HybridLayer))
    yield "format", str(_FORMAT)
    yield "numbers", str(NUMBERS)
    yield "numba", metadata.version("numba")
    yield "torch", str(torch.__version__)
    yield "transformers", ".".join(transformers.__version__.split(".")[:2])
    yield "class", _name_of_class(type(model))
    yield "config", digest_of(_settings(model.config.to_dict()))
    yield "modules", digest_of([[name, *_form_of(module)] for name, module in modules.items()])
    yield "weights", digest_of_tensors({each.form: each.data for each in tensors})
    yield "dtype", f"{model.dtype}{autocast}".replace("torch.", "")
    yield "attention", str(text._attn_implementation)
    yield "experts", str(getattr(text, "_experts_implementation", None))
    yield "device", "+".join(sorted(devices)) or "cpu"
    yield "layers", f"{ranges_text(layers, ', ') or 'none'} of {len(cache.layers)}"
    yield "codecs", _codecs_of(cache)
    yield "threads", str(torch.get_num_threads())
    yield "processor", torch.backends.cpu.get_cpu_capability()
    yield "default dtype", str(torch.get_default_dtype())
    yield from _switches()
    if cache.group is not None:
        yield "processes", str(cache.group.size())
        yield RANK, str(cache.group.rank())


def _switches() -> Iterator[tuple[str, str]]:
    """List what is set for the whole process and may change numbers: all that torch can be asked for, and ours."""
    yield from ((name, str(ask())) for name, ask in _questions())
    for place in product(("cuda", "mkldnn"), ("matmul", "conv", "rnn")):
        # Nothing is said until somebody has asked for full precision, which is what it means.
        yield f"float32 in {' '.join(place)}", str(torch._C._get_fp32_precision_getter(*place)).replace("none", "ieee")
    asked = {name: ask for name, ask in vars(processor).items() if name.startswith(("has_", "uses_"))}
    yield "kernels", ", ".join(name for name, ask in asked.items() if not signature(ask).parameters and ask())


@functools.cache
def _questions() -> list[tuple[str, Callable[[], Any]]]:
    """
    List the functions of torch that tell how its switches are set, with their names.

    Texts are left out, such as the name of the thread: what they say of numbers is told elsewhere, too.
    """
    found = []
    for name, ask in vars(torch._C).items():
        what = name.removeprefix("_get_")
        if what != name and (f"_set_{what}" in vars(torch._C) or what.endswith("_enabled")):
            with contextlib.suppress(TypeError, RuntimeError):  # it wants to know more, or will not say
                if not isinstance(ask(), str):
                    found.append((what, ask))
    return found


def _settings(value: Any) -> Any:
    """Return the settings of a config, and of those inside it, that say what its model computes."""
    if isinstance(value, dict):
        return {str(name): _settings(each) for name, each in value.items() if name not in _LEFT_OUT}
    if isinstance(value, list | tuple):
        return [_settings(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _codecs_of(cache: HybridCache) -> str:
    """Return the codecs as they were asked for, with digests of given channel scaling; choices do not count."""
    layers: dict[str, list[int]] = {}
    for index, codec in sorted(cache.asked_codecs.items()):
        try:
            tree = describe(codec)
        except ValueError as error:
            raise ModelIdentityError(str(error)) from error
        if weights := weights_of(codec):
            tree["weights"] = digest_of_tensors(dict(sorted(weights.items())))
        text = " ".join([tree.pop("name"), *(f"{key}={value}" for key, value in sorted(tree.items()))])
        layers.setdefault(text, []).append(index)
    return "; ".join(f"{ranges_text(indices, ', ')}: {text}" for text, indices in layers.items()) or "none"


def longest_text(model: PreTrainedModel) -> int | None:
    """
    Return up to how many tokens of a text states depend on the tokens before them alone; `None` for any number.

    A forward pass with a later position uses the long factors of longrope, for all of its tokens.
    """
    configs: list[Any] = [module.config for module in model.modules() if is_longrope(module)]
    return min((int(each.rope_parameters["original_max_position_embeddings"]) for each in configs), default=None)


def _require_identifiable(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
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


def _require_known_code(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> None:
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
            yield f"{where} is a {_name_of_class(type(module))}"
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


def _name_of_class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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
        if (counts or name[0] != "_") and name not in _NOT_COMPARED and (value := _plain(each)) is not None
    }
    return [_name_of_class(type(module)), plain, [_plain(hook) for hook in _hooks_of(module)]]


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
