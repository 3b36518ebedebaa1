"""The fields of an identity, read from a model and a cache."""

from collections.abc import Iterator, Mapping
from importlib import metadata

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from ..cache import HybridCache
from .adapters import adapters_of
from .cache_form import codecs_of, layers_of, selection_of
from .config_digest import config_digest
from .identity import Identity
from .modules import modules_digest, name_of_class
from .numbers import NUMBERS
from .refusals import require_identifiable, require_known_code, require_nothing_elsewhere
from .weights import stored_tensors, weights_digest

# Raise it when an identity means something else.
_FORMAT = 2
# The field with the rank of a process that keeps a shard.
RANK = "rank"


def identity_of(model: PreTrainedModel, cache: HybridCache, name: str | None = None) -> Identity:
    """
    Return what the states that a model stores in a cache depend on, beside the tokens.

    Each call reads all weights, as fast as memory is read: torch does not count writes through `weight.data`, so
    nothing proves that they are as they were. What hooks and functions of other programs do cannot be read: a model
    that has some needs a name.

    It is no protection from somebody who wants two models to have the same identity.

    Args:
        model: in evaluation mode, with all of its weights in memory.
        cache: which it will use; what is stored in it does not matter.
        name: of what the model does beside the code of its classes, such as "steering 2.0".

    Raises:
        TypeError: `model` is no model of transformers, such as the wrapper of PEFT, or `cache` is not one of ours.
        ModelIdentityError: the model is in training mode, some weights are not in memory, another library has quantized
            them, its states depend on texts that it read before, or it has no name and runs code of other programs.
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
    tensors = stored_tensors(modules)
    require_nothing_elsewhere(model, (each.owner for each in tensors))
    config = model.config
    text = config.get_text_config(decoder=True)
    version = Version(transformers.__version__)
    yield "format", str(_FORMAT)
    yield "numbers", str(NUMBERS)
    yield "numba", metadata.version("numba")
    yield "torch", str(torch.__version__)
    yield "transformers", f"{version.major}.{version.minor}"
    yield "class", name_of_class(type(model))
    yield "config", config_digest(config)
    yield "modules", modules_digest(modules)
    yield "weights", weights_digest(tensors)
    yield "adapters", adapters_of(modules)
    yield "dtype", _dtype_of(model)
    yield "attention", str(text._attn_implementation)
    yield "experts", str(getattr(text, "_experts_implementation", None))
    yield "device", "+".join(sorted({each.device for each in tensors if not each.stays_in_host_memory})) or "cpu"
    yield "layers", layers_of(cache)
    yield "codecs", codecs_of(cache)
    yield "selection", selection_of(cache)
    if cache.group is not None:
        yield "processes", str(cache.group.size())
        yield RANK, str(cache.group.rank())


def _dtype_of(model: PreTrainedModel) -> str:
    """Return the type in which the model computes, as far as its weights and autocast tell."""
    name = str(model.dtype).removeprefix("torch.")
    device = model.device.type
    if not torch.is_autocast_enabled(device):
        return name
    return f"{name}, autocast to {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
