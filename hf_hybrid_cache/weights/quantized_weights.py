"""A model's weights in few bits: for a while, or for good."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from ..storage import require_host_bytes
from .coded_weight import CodedWeight
from .coverage import Covered, NothingToCodeError, coverage
from .experts_implementation import chosen_experts_if_any, use_chosen_experts_if_any
from .width import GROUP_SIZE, HEAD_BITS, Width

# Seconds after which a bar is shown.
_WORTH_A_BAR = 1.0


@dataclass
class WeightsReport:
    """
    What became of a model's weights; `print` it.

    Attributes:
        bits: of a code.
        group_size: weights that share a scale.
        head_bits: of a code of the output head.
        coded_weights: how many are of few bits; stacked experts are one.
        original_bytes: of those, before.
        coded_bytes: of those, now.
        other_bytes: of all other weights.
        left: why other matrices stay as they were, by name.
    """

    bits: int
    group_size: int
    head_bits: int
    coded_weights: int = 0
    original_bytes: int = 0
    coded_bytes: int = 0
    other_bytes: int = 0
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        before, after = self.original_bytes + self.other_bytes, self.coded_bytes + self.other_bytes
        head = f" (the output head in {self.head_bits})" if self.head_bits != self.bits else ""
        text = (
            f"{self.coded_weights} weights in {self.bits} bits{head}, groups of {self.group_size}: "
            f"{before / 2**30:.2f} GiB became {after / 2**30:.2f} GiB"
        )
        return "\n".join([text, *(f"  {name} {reason}" for name, reason in self.left.items())])


@contextmanager
def weights_in_bits(
    model: PreTrainedModel, bits: int, group_size: int = GROUP_SIZE, head_bits: int = HEAD_BITS
) -> Iterator[WeightsReport]:
    """
    Let a model on the CPU compute with weights of few bits for a while; afterwards it has its own again, untouched.

    Linear layers, the output head, the embedding of tokens and stacked experts. A token takes a half to a quarter of
    the time, because reading weights is most of it. Codes are made when this is entered, which takes a few seconds for
    a billion weights, and are held beside the weights.

    Args:
        model: all of it in host memory.
        bits: 8 or 4, of a weight.
        group_size: weights of a row that share a scale: 32, 64 or 128. A scale takes as much as 32 bits of codes.
        head_bits: 8 or 4, of the output head, and so of the embedding that is tied to it. Errors there are errors of
            the logits; 4 bits take less memory and time.

    Yields:
        What was done, and which matrices stay as they are.

    Raises:
        TypeError: one of the numbers is not an integer.
        ValueError: they are others; the model is not on the CPU, or has no weights that could be of few bits.
        HostMemoryError: host memory would not suffice.

    Example:
        >>> with weights_in_bits(model, 4):
        ...     model.generate(**inputs, cache=cache)
    """
    width = Width.checked(bits, group_size, head_bits)
    covered, report = _prepared(model, width)
    with coded_for_a_while(covered, width, report), chosen_experts_if_any(model):
        yield report


def quantize_weights(
    model: PreTrainedModel, bits: int, group_size: int = GROUP_SIZE, head_bits: int = HEAD_BITS
) -> WeightsReport:
    """
    The same as `weights_in_bits`, for good: each weight is given back as soon as its codes are made.

    The model cannot be saved or trained afterwards. If this is interrupted, some weights are of few bits already.

    Returns:
        What was done, what it saved, and which matrices stay as they are; `print` it.

    Example:
        >>> print(quantize_weights(model, 4))
    """
    width = Width.checked(bits, group_size, head_bits)
    covered, report = _prepared(model, width)
    code_for_good(covered, width, report)
    use_chosen_experts_if_any(model)
    return report


@contextmanager
def coded_for_a_while(covered: list[Covered], width: Width, report: WeightsReport) -> Iterator[None]:
    """
    Let modules hold their weights in few bits; afterwards they have their own again.

    Raises:
        HostMemoryError: host memory would not suffice for both.
    """
    require_host_bytes(sum(each.coded_bytes(width) for each in covered), f"Weights in {width.bits} bits need")
    pairs = list(_coded_one_by_one(covered, width, report))
    try:
        try:
            for each, twin in pairs:
                each.hold(twin)
            yield
        finally:
            _hold_originals(pairs)
    except BaseException:
        _hold_originals(pairs)  # another Ctrl-C may have come while they were put back
        raise


def code_for_good(covered: list[Covered], width: Width, report: WeightsReport) -> None:
    """
    Let modules hold their weights in few bits; each is given back as soon as its codes are made.

    Raises:
        HostMemoryError: host memory would not suffice for the codes of one.
    """
    require_host_bytes(max(each.coded_bytes(width) for each in covered), f"Weights in {width.bits} bits need")
    code_each(covered, width, report)


def code_each(covered: list[Covered], width: Width, report: WeightsReport) -> None:
    """The same without a check, of any number of weights."""
    for each, twin in _coded_one_by_one(covered, width, report):
        each.hold(twin)


def _hold_originals(pairs: list[tuple[Covered, CodedWeight]]) -> None:
    for each, _ in pairs:
        each.hold(each.parameter)


def coding_bar(num_weights: int, bits: int | None) -> Any:
    """
    A bar that is shown where coding takes long, unless progress bars of transformers are switched off.

    Args:
        num_weights: to be coded.
        bits: of a code; `None` for no bar.
    """
    text = f"Weights in {bits} bits"
    return logging.tqdm(total=num_weights, desc=text, delay=_WORTH_A_BAR, leave=False, disable=bits is None)


def require_own_weights(model: PreTrainedModel, then: str) -> None:
    """
    Check that nobody else manages where weights are.

    Args:
        model: whose weights.
        then: how the advice to load the model onto the CPU goes on.

    Raises:
        ValueError: accelerate does.
    """
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            "accelerate manages where this model's weights are (several devices, or offloading). Load it onto the CPU, "
            f"without device_map, {then}."
        )


def require_some(covered: list[Covered], left: dict[str, str], model: PreTrainedModel) -> None:
    """
    Check that there is something to do.

    Raises:
        NothingToCodeError: no weight of the model can be of few bits.
    """
    if not covered:
        reasons = "; ".join(f"{name} {reason}" for name, reason in list(left.items())[:3])
        raise NothingToCodeError(
            f"No weight of {type(model).__name__} can be of few bits: {reasons or 'it has no matrices'}."
        )


def _prepared(model: PreTrainedModel, width: Width) -> tuple[list[Covered], WeightsReport]:
    devices = sorted({parameter.device.type for parameter in model.parameters()} - {"cpu"})
    if devices:
        require_own_weights(model, f"or with quantization_config=CodedWeightsConfig(bits={width.bits})")
        raise ValueError(
            f"Weights are on {' and '.join(devices)}; weights of few bits need the CPU. Use model.to('cpu'), "
            f"or decode there with custom_generate=decode_on_cpu.configure(weights={width.bits})."
        )
    covered, left = coverage(model)
    require_some(covered, left, model)
    ours = {id(each.parameter) for each in covered}
    others = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in ours)
    return covered, WeightsReport(*width, other_bytes=others, left=left)


def _coded_one_by_one(
    covered: list[Covered], width: Width, report: WeightsReport
) -> Iterator[tuple[Covered, CodedWeight]]:
    """Weights with their codes, noted in the report. Those it has passed on are not held here any more."""
    with coding_bar(len(covered), width.bits) as bar:
        while covered:
            each = covered.pop(0)
            num_bytes = each.parameter.nbytes
            try:
                twin = each.coded(each.parameter.data.to("cpu"), width)
            except ValueError as error:
                report.left[each.name] = str(error)
                report.other_bytes += num_bytes
            else:
                report.coded_weights += 1
                report.original_bytes += num_bytes
                report.coded_bytes += twin.matrices.num_bytes
                yield each, twin
                del twin
            del each
            bar.update()
