"""Models that have no identity, because their states depend on something that cannot be read from them."""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ..weights import QUANT_METHOD
from .errors import ModelIdentityError
from .rotations import unknown_by_length
from .unknown_code import unknown_code

_ELSEWHERE = (
    "which may keep numbers where they are not found. Load the model unquantized, or with QuantizedWeightsConfig."
)


def require_identifiable(model: PreTrainedModel, modules: Collection[nn.Module]) -> None:
    """
    Check everything but the weights.

    Args:
        model: of transformers.
        modules: all of its modules.

    Raises:
        ModelIdentityError: the model is in training mode, was quantized by another library, or turns keys by the
            length of the text.
    """
    if any(module.training for module in modules):
        raise ModelIdentityError(
            f"{type(model).__name__} is in training mode, in which dropout changes the states at random. Call "
            "model.eval() first."
        )
    quantizer = getattr(model, "hf_quantizer", None)
    quantization = getattr(quantizer, "quantization_config", None)
    # The quantizer of a GGUF file stays with the weights that it has dequantized.
    if quantizer is not None and getattr(quantization, "quant_method", None) not in (QUANT_METHOD, "gguf"):
        raise ModelIdentityError(
            f"{type(model).__name__} was quantized by another library ({type(quantization).__name__}), {_ELSEWHERE}"
        )
    if by_length := unknown_by_length(modules):
        raise ModelIdentityError(
            f"{type(model).__name__} turns keys by the length of the text, and of texts that it read before (rope_type "
            f"{' and '.join(by_length)}), so states depend on more than the tokens before them. Use a rope_type that "
            "does not, such as yarn."
        )


def require_known_code(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> None:
    """
    Check that what a model computes can be told from its classes, attributes and weights.

    Args:
        model: of transformers.
        modules: all of its modules, by name.

    Raises:
        ModelIdentityError: it runs code of other programs, such as a hook.
    """
    if unknown := unknown_code(model, modules):
        raise ModelIdentityError(
            f"{type(model).__name__} runs code whose effect cannot be told: {unknown}. Remove it, or give what it does "
            'a name, PrefixStore(path, identity="steering 2.0"), and another name whenever that changes.'
        )


def require_nothing_elsewhere(model: PreTrainedModel, known: Iterable[torch.Tensor]) -> None:
    """
    Check that a checkpoint of the model would have parameters and buffers only.

    Args:
        model: of transformers.
        known: its parameters and buffers.

    Raises:
        ModelIdentityError: some modules keep numbers beside them.
    """
    ids = set(map(id, known))
    hidden = [name for name, value in model.state_dict(keep_vars=True).items() if id(value) not in ids]
    if hidden:
        raise ModelIdentityError(f"{hidden[0]} is no parameter and no buffer; another library made it, {_ELSEWHERE}")
