"""The tensors of a model as they are in memory, and a digest of every byte of them."""

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from xxhash import xxh3_128

from ..weights import HostWeight, QuantizedWeight
from .identity import ModelIdentityError, digest_of

ELSEWHERE = (
    "which may keep numbers where they are not found. Load the model unquantized, or with QuantizedWeightsConfig."
)
# Subclasses of other libraries may keep numbers elsewhere.
_PLAIN = (torch.Tensor, nn.Parameter, HostWeight)
# What is copied at a time to be read.
_COPIED_BYTES = 64 * 2**20


class StoredTensor(NamedTuple):
    """A parameter or buffer of a model, or the panels of a quantized one."""

    form: str  # its name, and what says how its bytes are read where its type and shape do not
    data: torch.Tensor  # the bytes, a plain tensor
    stays_in_host_memory: bool  # whether the model computes on another device


def stored_tensors(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> list[StoredTensor]:
    """List all parameters and buffers by name, tied ones once; also buffers that are not in a checkpoint."""
    found: dict[int, StoredTensor] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for prefix, module in modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                # longrope computes these in each pass, from others that are listed.
                is_computed = name == "inv_freq" and is_longrope(module)
                if tensor is not None and id(tensor) not in found and not is_computed:
                    found[id(tensor)] = _stored(f"{prefix}.{name}", tensor)
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in found:
            raise ModelIdentityError(f"{name} is no parameter and no buffer; another library made it, {ELSEWHERE}")
    return sorted(found.values(), key=lambda each: each.form)


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of names, types, shapes and every byte of plain tensors."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        digests = tensor_digests(list(tensors.values()))
        forms = [(name, str(each.dtype), *each.shape) for name, each in tensors.items()]
    return digest_of([(*form, read.hex()) for form, read in zip(forms, digests, strict=True)])


def tensor_digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """
    Return the 16 bytes of XXH3 of each tensor's numbers in the order of its indices, for any strides and device.

    Args:
        tensors: plain, with their numbers in memory.
    """
    # The memory of a conjugate is that of the tensor.
    tensors = [each.resolve_conj().resolve_neg() for each in tensors]
    memories = {index: _memory(each) for index, each in enumerate(tensors) if each.is_cpu and each.is_contiguous()}
    digests: dict[int, bytes] = {}

    def digest_share(indices: Sequence[int]) -> None:
        digests.update({index: xxh3_128(memories[index]).digest() for index in indices})

    # A thread takes many tensors at a time, as the call takes longer than a small one. The largest are first.
    ordered = sorted(memories, key=lambda index: len(memories[index]), reverse=True)
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(digest_share, (ordered[first :: 4 * num_threads] for first in range(4 * num_threads))))
    return [digests[index] if index in digests else _copied(each) for index, each in enumerate(tensors)]


def is_longrope(module: nn.Module) -> bool:
    """Return whether a module has one of two sets of frequencies by the length of the text, as transformers does it."""
    return vars(module).get("rope_type") == "longrope" and type(module).__module__.startswith("transformers.")


def _memory(tensor: torch.Tensor) -> ctypes.Array:
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _copied(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor that is copied in parts to be read."""
    rows = tensor if tensor.dim() else tensor[None]
    digest = xxh3_128()
    for part in rows.split(max(1, _COPIED_BYTES * len(rows) // max(1, rows.nbytes))):
        copied = part.contiguous().cpu()
        digest.update(_memory(copied))
    return digest.digest()


def _stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    if isinstance(tensor, QuantizedWeight):
        matrices, layout = tensor.matrices, tensor.matrices.layout
        sizes = layout.bits, layout.group, layout.rows, layout.columns
        view = tensor.which, tensor.is_transposed, tensor.dtype
        return StoredTensor(f"{name} panels {sizes} {matrices.factors} {view}", matrices.panels, tensor.stays)
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
    return StoredTensor(name, tensor.detach(), isinstance(tensor, HostWeight))
