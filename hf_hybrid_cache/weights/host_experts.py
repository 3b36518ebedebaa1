"""A mixture-of-experts model's experts in host memory: for a while, or for good."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..storage import require_host_bytes
from .coded_weight import CodedWeight
from .coverage import Covered, coverage
from .experts_implementation import chosen_experts_used, require_experts, use_chosen_experts
from .host_weight import HostWeight
from .popular_experts import PopularExperts
from .quantized_weights import WeightsReport, code_for_good, coded_for_a_while, require_own_weights, require_some
from .width import GROUP_SIZE, Width, checked_integer


@dataclass(frozen=True)
class ExpertsReport:
    """
    What became of a model's experts; `print` it.

    Attributes:
        layers: that have experts.
        experts: of a layer, at most.
        bits: of a weight; `None` for experts as they are.
        original_bytes: of all experts, before.
        host_bytes: of all experts, in host memory now.
        other_bytes: of all other weights.
        left: why some are not of few bits, by name.
    """

    layers: int
    experts: int
    bits: int | None
    original_bytes: int
    host_bytes: int
    other_bytes: int
    left: dict[str, str]

    def __str__(self) -> str:
        size = f"{self.host_bytes / 2**30:.2f} GiB"
        if self.bits is not None:
            size += f" in {self.bits} bits, which were {self.original_bytes / 2**30:.2f} GiB"
        text = f"{self.layers} layers of {self.experts} experts in host memory: {size}; "
        text += f"other weights take {self.other_bytes / 2**30:.2f} GiB"
        return "\n".join([text, *(f"  {name} {reason}" for name, reason in self.left.items())])


@contextmanager
def host_experts(
    model: PreTrainedModel, bits: int | None = None, group_size: int = GROUP_SIZE
) -> Iterator[ExpertsReport]:
    """
    Let a mixture-of-experts model compute its experts in host memory for a while; only those are read that a token has
    chosen. Afterwards it has its own experts and its own way to compute them again.

    The model is on the CPU. A token, or a few, are multiplied with the experts by one call of a kernel for a layer; of
    a prompt, experts that many tokens have chosen are multiplied by torch. With `bits`, codes are made when this is
    entered, and are held beside the weights.

    Args:
        model: of a family whose experts transformers' `ExpertsInterface` knows.
        bits: 8 or 4, of an expert's weight; `None` for experts as they are.
        group_size: weights of a row that share a scale: 32, 64 or 128.

    Yields:
        What was done.

    Raises:
        TypeError: one of the numbers is not an integer.
        ValueError: they are others; the model is not on the CPU, or has no such experts.
        HostMemoryError: host memory would not suffice.

    Example:
        >>> with host_experts(model, 4):
        ...     model.generate(**inputs, cache=cache)
    """
    width = _checked(bits, group_size)
    _require_cpu(model)
    with chosen_experts_used(model):
        if width is None:
            yield _report(model, None)
        else:
            covered, report = _prepared(model, width)
            with coded_for_a_while(covered, width, report):
                yield _report(model, report)


def move_experts_to_host(
    model: PreTrainedModel, bits: int | None = None, group_size: int = GROUP_SIZE, device_experts: int = 0
) -> ExpertsReport:
    """
    Keep a mixture-of-experts model's experts in host memory for good, whatever device the rest of it is on or is moved
    to: `model.to(device)` leaves them there.

    On the CPU they are computed as by `host_experts`. With the rest on an accelerator, few tokens go to the experts:
    only activations cross the bus. Of many tokens, as in a prompt, experts that at least 32 of them have chosen are
    brought to the device, the next one while this one computes. With `bits`, each weight is given back as soon as its
    codes are made. If this is interrupted, some experts have been moved already.

    Args:
        model: of a family whose experts transformers' `ExpertsInterface` knows.
        bits: 8 or 4, of an expert's weight; `None` for experts as they are.
        group_size: weights of a row that share a scale: 32, 64 or 128.
        device_experts: of each layer, copies of the experts that most tokens have chosen so far stay on the device,
            as they are; so many. Which, is looked at after every 256 tokens at most. It helps where few experts are
            chosen by most tokens, and the device has room to spare.

    Returns:
        What was done; `print` it.

    Raises:
        TypeError: one of the numbers is not an integer.
        ValueError: they are others; the model has no such experts, or accelerate manages where its weights are.
        HostMemoryError: host memory would not suffice.

    Example:
        >>> print(move_experts_to_host(model, 4))
        >>> model.to("cuda")
    """
    width = _checked(bits, group_size)
    device_experts = checked_integer("device_experts", device_experts)
    if device_experts < 0:
        raise ValueError(f"device_experts must not be negative, got {device_experts}. 0 keeps all in host memory.")
    require_own_weights(model, "move its experts, then use model.to(device)")
    if any(weight.is_meta for module in require_experts(model).values() for weight in module.parameters()):
        raise ValueError("Weights are on meta: load the model's weights first.")
    before = use_chosen_experts(model)
    report = None
    try:
        if width is not None:
            covered, report = _prepared(model, width)
            code_for_good(covered, width, report)
        _let_stay(model, device_experts)
    except BaseException:
        model.set_experts_implementation(before)
        raise
    return _report(model, report)


def _let_stay(model: PreTrainedModel, device_experts: int) -> None:
    """Have all weights of experts in host memory, also when the model is moved."""
    modules = require_experts(model).values()
    elsewhere = [weight for module in modules for weight in module.parameters() if not weight.is_cpu]
    require_host_bytes(sum(weight.nbytes for weight in elsewhere), "Experts in host memory need")
    del elsewhere
    for module in modules:
        for name, weight in module._parameters.items():
            if isinstance(weight, CodedWeight):
                weight.stays = True
            elif weight is not None:
                module._parameters[name] = HostWeight.of(weight)
        down: Any = module._parameters["down_proj"]
        down.popular = PopularExperts(min(device_experts, module.num_experts)) if device_experts else None


def _checked(bits: int | None, group_size: int) -> Width | None:
    return None if bits is None else Width.checked(bits, group_size)


def _require_cpu(model: PreTrainedModel) -> None:
    devices = sorted({parameter.device.type for parameter in model.parameters()} - {"cpu"})
    if devices:
        require_own_weights(model, "then use host_experts")
        raise ValueError(
            f"Weights are on {' and '.join(devices)}, and experts go to host memory for a while only where all of the "
            "model is on the CPU. Use move_experts_to_host."
        )


def _prepared(model: PreTrainedModel, width: Width) -> tuple[list[Covered], WeightsReport]:
    """The experts that can be of few bits, and an empty report of them."""
    modules: set[Any] = set(require_experts(model).values())
    covered, left = coverage(model)
    ours = [each for each in covered if any(module in modules for module, _ in each.holders)]
    names = {id(weight): name for name, weight in model.named_parameters()}
    stacks = {names[id(weight)] for module in modules for weight in module.parameters() if weight.dim() == 3}
    left = {name: reason for name, reason in left.items() if name in stacks}
    require_some(ours, left, model)
    return ours, WeightsReport(*width, left=left)


def _report(model: PreTrainedModel, coded: WeightsReport | None) -> ExpertsReport:
    modules: dict[str, Any] = require_experts(model)
    own = {id(weight): weight for module in modules.values() for weight in module.parameters()}
    others = sum(weight.nbytes for weight in model.parameters() if id(weight) not in own)
    host_bytes = sum(map(_bytes_of, own.values()))
    saved = 0 if coded is None else coded.original_bytes - coded.coded_bytes
    return ExpertsReport(
        layers=len(modules),
        experts=max(module.num_experts for module in modules.values()),
        bits=None if coded is None else coded.bits,
        original_bytes=host_bytes + saved,
        host_bytes=host_bytes,
        other_bytes=others,
        left={} if coded is None else coded.left,
    )


def _bytes_of(weight: Any) -> int:
    num_bytes: int = weight.matrices.num_bytes if isinstance(weight, CodedWeight) else weight.nbytes
    return num_bytes
