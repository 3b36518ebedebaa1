"""The options that name a model, and say how and where it is loaded."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .choices import EXPERTS, WEIGHT_BITS
from .console import UsageError, check_choice, dtype_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelOptions:
    """
    A model, and how it holds its weights.

    Attributes:
        name: a short name, a model of the Hugging Face Hub, or a folder.
        weights: bits of each weight; `None` keeps the weights as they are.
        experts: "host" puts experts into host memory; `None` leaves them where the model is.
        expert_bits: bits of each weight of experts in host memory; `None` keeps them as they are.
        dtype: one of `DTYPES`; `None` for the model's own.
        device: as torch names it; `None` for an accelerator if there is one.

    Raises:
        UsageError: a value is not one of the choices, or two options exclude each other.
    """

    name: str
    weights: int | None = None
    experts: str | None = None
    expert_bits: int | None = None
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.weights not in (None, *WEIGHT_BITS):
            raise UsageError(f"--weights must be 8 or 4, got {self.weights}. Leave it out for the weights as they are.")
        if self.expert_bits not in (None, *WEIGHT_BITS):
            raise UsageError(
                f"--expert-bits must be 8 or 4, got {self.expert_bits}. Leave it out for the experts as they are."
            )
        if self.experts is not None:
            check_choice("--experts", self.experts, EXPERTS)
        if self.expert_bits is not None and self.experts is None:
            raise UsageError(f"--expert-bits {self.expert_bits} is for experts in host memory: add --experts host.")
        if self.weights is not None and self.experts is not None:
            raise UsageError("--weights is of all weights, experts too: drop it, or --experts.")
        dtype_of(self.dtype)

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        return dtype_of(self.dtype)

    @property
    def quantized_bits(self) -> int | None:
        """Bits of the weights that are quantized, all of them or those of experts; `None` quantizes none."""
        return self.expert_bits if self.weights is None else self.weights

    @property
    def only_experts(self) -> bool:
        """Whether weights other than those of experts stay as they are."""
        return self.weights is None
