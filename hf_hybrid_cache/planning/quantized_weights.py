"""The size of a model's quantized weights, computed on the meta device."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..weights import Width, coverage


@dataclass(frozen=True)
class QuantizedWeights:
    """
    The sizes of a model's weights, quantized where possible.

    Attributes:
        quantized_bytes: of all codes.
        largest_matrix_bytes: of the largest matrix before it is quantized; each expert has its own matrices.
        other_bytes: of the weights that are not quantized.
        step_quantized_bytes: of the codes that a decode step reads, by bits; the output head may have other bits.
        step_other_bytes: of the other weights that a decode step reads.
    """

    quantized_bytes: int
    largest_matrix_bytes: int
    other_bytes: int
    step_quantized_bytes: Mapping[int, int]
    step_other_bytes: int


def quantized_weights(
    model: PreTrainedModel, read: Sequence[tuple[torch.Tensor, float]], bits: int
) -> QuantizedWeights | None:
    """
    The sizes of the weights after `quantize_weights` with its defaults; `None` if no weight can be quantized.

    Args:
        model: any model, also on the meta device.
        read: the weights that a decode step reads, and the share of each that it reads.
        bits: of a weight.
    """
    width = Width.checked(bits)
    covered = {id(each.parameter): each for each in coverage(model)[0]}
    codes = {key: each.quantized_bytes(width) for key, each in covered.items()}
    if not codes:
        return None
    step_quantized: Counter[int] = Counter()
    for weight, share in read:
        if (each := covered.get(id(weight))) is not None:
            step_quantized[width.head_bits if each.is_head else width.bits] += int(share * codes[id(weight)])
    return QuantizedWeights(
        quantized_bytes=sum(codes.values()),
        largest_matrix_bytes=max(each.matrix_bytes for each in covered.values()),
        other_bytes=sum(weight.nbytes for weight in model.parameters() if id(weight) not in codes),
        step_quantized_bytes=step_quantized,
        step_other_bytes=int(sum(share * weight.nbytes for weight, share in read if id(weight) not in codes)),
    )
