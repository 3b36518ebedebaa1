"""What a model's weights take in few bits, asked of a model on the meta device."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..weights import Width, coverage


@dataclass(frozen=True)
class CodedWeights:
    """
    Weights of which those that can be are of few bits.

    Attributes:
        coded_bytes: of the codes.
        largest_matrix_bytes: of one matrix as it is, at most; each expert has its own.
        other_bytes: of the weights that stay as they are.
        step_coded_bytes: of the codes that are read for one token, by their bits: the output head may have more.
        step_other_bytes: of the other weights, likewise.
    """

    coded_bytes: int
    largest_matrix_bytes: int
    other_bytes: int
    step_coded_bytes: Mapping[int, int]
    step_other_bytes: int


def coded_weights(model: PreTrainedModel, read: Sequence[tuple[torch.Tensor, float]], bits: int) -> CodedWeights | None:
    """
    What `quantize_weights` with its usual groups makes of a model; `None` where no weight can be of few bits.

    Args:
        model: may be on the meta device.
        read: the weights that are read for one token, and the share of each.
        bits: of a weight.
    """
    width = Width.checked(bits)
    covered = {id(each.parameter): each for each in coverage(model)[0]}
    codes = {key: each.coded_bytes(width) for key, each in covered.items()}
    if not codes:
        return None
    step_coded: Counter[int] = Counter()
    for weight, share in read:
        if (each := covered.get(id(weight))) is not None:
            step_coded[width.head_bits if each.is_head else width.bits] += int(share * codes[id(weight)])
    return CodedWeights(
        coded_bytes=sum(codes.values()),
        largest_matrix_bytes=max(each.matrix_bytes for each in covered.values()),
        other_bytes=sum(weight.nbytes for weight in model.parameters() if id(weight) not in codes),
        step_coded_bytes=step_coded,
        step_other_bytes=int(sum(share * weight.nbytes for weight, share in read if id(weight) not in codes)),
    )
