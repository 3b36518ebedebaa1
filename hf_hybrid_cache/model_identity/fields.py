"""The fields of an identity, read from a model and a cache."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from inspect import signature
from itertools import groupby, product
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ..cache import HybridCache
from ..codecs import describe, weights_of
from ..kernels.vector import processor
from ..layers import HybridLayer
from .identity import RANK, Identity, ModelIdentityError, digest_of
from .modules import modules_digest, name_of_class, require_identifiable, require_known_code
from .weights import digest_of_tensors, stored_tensors

# Raise it when an identity means something else.
_FORMAT = 4
# Raise it when kernels or codecs give other results than before: states that were kept are then read again.
NUMBERS = 5
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
    require_identifiable(model, modules.values())
    if name is None:
        require_known_code(model, modules)
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
    yield "class", name_of_class(type(model))
    yield "config", digest_of(_settings(model.config.to_dict()))
    yield "modules", modules_digest(modules)
    yield "weights", digest_of_tensors({each.form: each.data for each in tensors})
    yield "dtype", f"{model.dtype}{autocast}".replace("torch.", "")
    yield "attention", str(text._attn_implementation)
    yield "experts", str(getattr(text, "_experts_implementation", None))
    yield "device", "+".join(sorted(devices)) or "cpu"
    yield "layers", f"{_ranges(layers)} of {len(cache.layers)}"
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
        yield f"float32 in {' '.join(place)}", str(torch._C._get_fp32_precision_getter(*place))
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
    return "; ".join(f"{_ranges(indices)}: {text}" for text, indices in layers.items()) or "none"


def _ranges(indices: Iterable[int]) -> str:
    """Return sorted indices as text, such as "0-3, 7"; "none" for none."""
    runs = ([index for _, index in run] for _, run in groupby(enumerate(indices), key=lambda each: each[1] - each[0]))
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
