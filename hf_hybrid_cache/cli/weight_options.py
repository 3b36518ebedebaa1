"""What `--weights`, `--experts` and `--expert-bits` say together."""

from dataclasses import dataclass

from .choices import EXPERTS, WEIGHT_BITS
from .console import UsageError, check_choice


@dataclass(frozen=True)
class WeightOptions:
    """
    How a model holds its weights.

    Attributes:
        weights: bits of each; `None` as they are.
        experts: `host` for experts in host memory; `None` where the model is.
        expert_bits: of each weight of those; `None` as they are.

    Raises:
        UsageError: they do not go together, or there are no such weights.
    """

    weights: int | None = None
    experts: str | None = None
    expert_bits: int | None = None

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

    @property
    def bits(self) -> int | None:
        """Of the weights that are coded, whichever they are."""
        return self.expert_bits if self.weights is None else self.weights

    @property
    def only_experts(self) -> bool:
        return self.weights is None
