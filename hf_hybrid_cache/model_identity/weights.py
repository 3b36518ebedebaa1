"""The tensors of a model, as they are in memory, and a digest of every byte of them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..weights import HostWeight, QuantizedWeight
from .digests import DIGEST_BYTES
from .errors import ModelIdentityError
from .hashed_tensors import tensor_digests
from .rotations import is_longrope

# Subclasses of other libraries may keep numbers elsewhere.
_PLAIN = (torch.Tensor, nn.Parameter, HostWeight)


@dataclass(frozen=True)
class StoredTensor:
    """
    A parameter or buffer of a model, or the panels of a quantized one.

    Attributes:
        form: its name, and what says how its bytes are read; plain values.
        owner: the tensor in the module.
        data: the bytes, a plain tensor.
        stays_in_host_memory: whether the model computes on another device.
    """

    form: tuple[str, ...]
    owner: torch.Tensor
    data: torch.Tensor
    stays_in_host_memory: bool

    @property
    def device(self) -> str:
        return self.data.device.type


def stored_tensors(modules: Mapping[str, nn.Module]) -> list[StoredTensor]:
    """
    List all parameters and buffers by name, tied ones once; also buffers that are not in a checkpoint.

    Args:
        modules: all modules of a model, by name.

    Raises:
        ModelIdentityError: some are not in memory, or of a class of another library.
    """
    found: dict[int, StoredTensor] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for prefix, module in modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                # longrope computes these in each pass, from others that are listed.
                is_computed = name == "inv_freq" and is_longrope(module)
                if tensor is not None and id(tensor) not in found and not is_computed:
                    found[id(tensor)] = _stored(f"{prefix}.{name}", tensor)
    return sorted(found.values(), key=lambda each: each.form)


def weights_digest(tensors: list[StoredTensor]) -> str:
    """Return the digest of names, forms and every byte of all tensors."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for each, read in zip(tensors, tensor_digests([each.data for each in tensors]), strict=True):
            # The line says how many bytes follow it.
            digest.update(json.dumps([*each.form, each.data.nbytes]).encode() + b"\n")
            digest.update(read)
    return digest.hexdigest()


def _stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    if isinstance(tensor, QuantizedWeight):
        return _stored_panels(name, tensor)
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
        raise ModelIdentityError(
            f"{name} is a {type(tensor).__name__} ({tensor.layout}), not a plain tensor, and may keep numbers where "
            "they are not found. Load the model without the library that made it."
        )
    if tensor.is_meta:
        raise ModelIdentityError(
            f"{name} is not in memory but on meta, as with accelerate's offloading to the CPU or a disk, and cannot be "
            "read. Load the model without device_map, or use move_experts_to_host."
        )
    form = name, str(tensor.dtype), str(tuple(tensor.shape))
    return StoredTensor(form, tensor, tensor.detach(), isinstance(tensor, HostWeight))


def _stored_panels(name: str, weight: QuantizedWeight) -> StoredTensor:
    matrices = weight.matrices
    layout = matrices.layout
    sizes = layout.bits, layout.group, layout.rows, layout.columns
    view = weight.which, weight.is_transposed, weight.dtype
    form = name, "panels", *map(str, (*sizes, *matrices.factors, *view))
    return StoredTensor(form, weight, matrices.panels, weight.stays)
