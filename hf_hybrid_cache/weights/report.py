"""The account of a change to a model's weights."""

from dataclasses import dataclass, field


@dataclass
class WeightsReport:
    """
    A change to a model's weights, in numbers; `print` it.

    Attributes:
        bits: of a code; `None` where nothing was quantized.
        group_size: weights that share a scale.
        head_bits: of a code of the output head.
        quantized_weights: number of weights that were quantized; stacked experts are one.
        original_bytes: of the quantized weights, before.
        quantized_bytes: of the quantized weights, now.
        other_bytes: of all other weights.
        left: names of matrices that were not quantized, with the reason.
        expert_layers: number of layers whose experts are now in host memory; 0 for `quantize_weights`.
        experts: number of experts in each of these layers, at most.
        expert_bytes: of all these experts, now, whether quantized or not.
    """

    bits: int | None = None
    group_size: int | None = None
    head_bits: int | None = None
    quantized_weights: int = 0
    original_bytes: int = 0
    quantized_bytes: int = 0
    other_bytes: int = 0
    left: dict[str, str] = field(default_factory=dict)
    expert_layers: int = 0
    experts: int = 0
    expert_bytes: int = 0

    def __str__(self) -> str:
        text = self._about_experts() if self.expert_layers else self._about_weights()
        return "\n".join([text, *(f"  {name} {reason}" for name, reason in self.left.items())])

    def _about_weights(self) -> str:
        before, after = self.original_bytes + self.other_bytes, self.quantized_bytes + self.other_bytes
        head = f" (the output head in {self.head_bits})" if self.head_bits != self.bits else ""
        return (
            f"{self.quantized_weights} weights in {self.bits} bits{head}, groups of {self.group_size}: "
            f"{_gibibytes(before)} became {_gibibytes(after)}"
        )

    def _about_experts(self) -> str:
        size = _gibibytes(self.expert_bytes)
        if self.bits is not None:
            before = self.expert_bytes - self.quantized_bytes + self.original_bytes
            size += f" in {self.bits} bits, which were {_gibibytes(before)}"
        others = self.quantized_bytes + self.other_bytes - self.expert_bytes
        return (
            f"{self.expert_layers} layers of {self.experts} experts in host memory: {size}; "
            f"other weights take {_gibibytes(others)}"
        )


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
