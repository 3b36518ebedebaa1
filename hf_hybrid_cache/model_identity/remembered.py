"""The digest of a model's weights, kept while the model lives and as long as they seem the same."""

import weakref
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .refusals import require_nothing_elsewhere
from .weights import StoredTensor, weights_digest

# Numbers of each tensor that are compared: its version counter does not tell of changes through `data`.
_SAMPLES = 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _Remembered(NamedTuple):
    """
    A digest, and what its weights were known by.

    Attributes:
        owners: weak references, as another tensor may be where one was.
    """

    owners: list["weakref.ref[torch.Tensor]"]
    marks: list[tuple[Any, ...]]
    samples: list[torch.Tensor]
    digest: str


_REMEMBERED: "weakref.WeakKeyDictionary[PreTrainedModel, _Remembered]" = weakref.WeakKeyDictionary()


def weights_digest_of(model: PreTrainedModel, tensors: list[StoredTensor]) -> str:
    """
    Return the digest of a model's weights, which are read only if they may have changed.

    Args:
        model: of transformers.
        tensors: of the model, as `stored_tensors` lists them.

    Raises:
        ModelIdentityError: some modules keep numbers beside parameters and buffers.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        # torch does not count changes of tensors that were made in inference mode.
        can_be_remembered = not any(each.owner.is_inference() or each.data.is_inference() for each in tensors)
        marks, samples = (list(map(_mark, tensors)), _samples(tensors)) if can_be_remembered else ([], [])
    known = _REMEMBERED.get(model)
    if known is not None and _are_same(known, tensors, marks, samples):
        return known.digest
    require_nothing_elsewhere(model, (each.owner for each in tensors))
    digest = weights_digest(tensors)
    if can_be_remembered:
        owners = [weakref.ref(each.owner) for each in tensors]
        _REMEMBERED[model] = _Remembered(owners, marks, samples, digest)
    return digest


def _are_same(
    known: _Remembered, tensors: list[StoredTensor], marks: list[tuple[Any, ...]], samples: list[torch.Tensor]
) -> bool:
    return (
        known.marks == marks
        and all(owner() is each.owner for owner, each in zip(known.owners, tensors, strict=True))
        and all(map(torch.equal, known.samples, samples))
    )


def _mark(stored: StoredTensor) -> tuple[Any, ...]:
    data = stored.data
    return stored.form, data.device, data.data_ptr(), data.stride(), stored.owner._version, data._version


def _samples(tensors: list[StoredTensor]) -> list[torch.Tensor]:
    """Return the bits of some numbers of each tensor, those of one type and device together."""
    together: dict[Any, list[torch.Tensor]] = {}
    for each in tensors:
        data = each.data
        # Some of the memory that it lies in, whatever its strides.
        room = data.untyped_storage().nbytes() // data.element_size() - data.storage_offset()
        size = min(data.numel(), room)
        count = min(size, _SAMPLES)
        if count:
            step = size // count
            taken = data.as_strided((count,), (step,), data.storage_offset()).view(_BITS[data.element_size()])
            together.setdefault((taken.dtype, data.device), []).append(taken)
    return [torch.cat(taken).cpu() for taken in together.values()]
