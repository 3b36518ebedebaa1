"""Checking that a model's weights are plain tensors, which can be moved and converted."""

from typing import Any

import torch
from torch import nn

# Dtypes of weights, and of the indices and masks that ordinary models keep beside them.
_PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def require_plain_weights(model: Any, otherwise: str) -> None:
    """
    Check that all weights of a model are plain tensors of numbers, each a parameter or a buffer.

    Weights that another library has quantized are not: their scales do not move along, and some modules pack them again
    for the device that they compute on.

    Args:
        model: any model, also one without a mark of the library that has quantized it.
        otherwise: the end of the message, with another way out.

    Raises:
        ValueError: some weights are not plain tensors.
    """
    weights, way_out = _others(model)
    if weights:
        raise ValueError(f"{weights} cannot be moved or converted. Load the model {way_out}, {otherwise}")


def _others(model: Any) -> tuple[str, str]:
    """A description of weights that are not plain, and what to load instead; empty strings if all are plain."""
    quantizer = getattr(model, "hf_quantizer", None)
    config = getattr(quantizer, "quantization_config", None)
    # The quantizer of a GGUF file stays with the weights that it has dequantized.
    if quantizer is not None and getattr(config, "quant_method", None) != "gguf":
        return f"Quantized weights ({type(config).__name__})", "unquantized"
    tensors = (*model.parameters(), *model.buffers())
    # bitsandbytes has parameters of its own over plain data.
    kinds = {kind for tensor in tensors for kind in (type(tensor), type(tensor.data))} - {torch.Tensor, nn.Parameter}
    if kinds:
        return f"Weights of type {', '.join(sorted(kind.__name__ for kind in kinds))}", "with plain tensors"
    # Last, because packed modules unpack their weights for a state dict, or refuse.
    in_checkpoint = model.state_dict(keep_vars=True)
    known = {id(tensor) for tensor in tensors}
    hidden = [name for name, value in in_checkpoint.items() if id(value) not in known]
    if hidden:
        return f"Weights that {_holder(model, hidden[0])} keeps beside parameters and buffers", "unquantized"
    codes = {str(tensor.dtype) for tensor in in_checkpoint.values() if tensor.dtype not in _PLAIN_DTYPES}
    if codes:
        return f"Weights of type {', '.join(sorted(codes))}", "unquantized"
    return "", ""


def _holder(model: nn.Module, name: str) -> str:
    """The class of the innermost module that an entry of the checkpoint belongs to."""
    modules = dict(model.named_modules())
    while name not in modules:
        name = name.rpartition(".")[0]
    kind = type(modules[name])
    return f"{kind.__module__}.{kind.__qualname__}"
