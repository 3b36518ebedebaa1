"""Keeping the experts of a mixture-of-experts model in host memory, permanently or inside a `with` block."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, overload

from transformers import PreTrainedModel

from ..storage import require_host_bytes
from .coverage import Covered, coverage
from .experts_implementation import chosen_experts_used, require_experts, use_chosen_experts
from .host_weight import HostWeight
from .hot_experts import HotExperts
from .quantized_weight import QuantizedWeight
from .quantized_weights import quantize_permanently, require_own_weights, require_some, temporarily_quantized
from .report import WeightsReport
from .width import GROUP_SIZE, Width, checked_bool, checked_integer


@overload
def move_experts_to_host(
    model: PreTrainedModel,
    bits: int | None = ...,
    group_size: int = ...,
    device_experts: int = ...,
    *,
    temporary: Literal[False] = ...,
) -> WeightsReport: ...


@overload
def move_experts_to_host(
    model: PreTrainedModel, bits: int | None = ..., group_size: int = ..., *, temporary: Literal[True]
) -> AbstractContextManager[WeightsReport]: ...


def move_experts_to_host(
    model: PreTrainedModel,
    bits: int | None = None,
    group_size: int = GROUP_SIZE,
    device_experts: int = 0,
    *,
    temporary: bool = False,
) -> WeightsReport | AbstractContextManager[WeightsReport]:
    """
    Keep the experts of a mixture-of-experts model in host memory and compute them on the CPU.

    A kernel reads only the experts that a token has chosen, one call for a layer. In a prompt, torch multiplies the
    experts that many tokens have chosen.

    By default the change is permanent, and the rest of the model may be on any device: `model.to(device)` leaves the
    experts where they are. With the rest on an accelerator, only activations cross the bus while few tokens are
    computed. In a prompt, each expert that at least 32 tokens have chosen is copied to the device, the next one while
    this one computes. With `bits`, each weight is freed as soon as its codes are made. An interrupted call leaves some
    experts moved.

    With `temporary=True` the result is a context manager, for a model on the CPU. The experts are computed this way,
    and quantized if `bits` are given, inside its block. When the block ends, the model has the very same parameters
    and its own experts implementation again.

    Args:
        model: of a family whose experts transformers' `ExpertsInterface` knows.
        bits: of an expert's weight, 8 or 4; `None` for the experts as they are.
        group_size: number of weights in a row that share a scale: 32, 64 or 128.
        device_experts: number of experts of each layer of which copies, not quantized, stay on the device: those that
            most tokens have chosen so far. The choice is reviewed after at most 256 tokens. This helps where most
            tokens choose few experts, and the device has room to spare.
        temporary: change the model inside a `with` block only.

    Returns:
        A report of the experts and their bytes. With `temporary=True`, a context manager that gives the report.

    Raises:
        TypeError: a number is not an integer, or `temporary` is not a bool.
        ValueError: a number is not one of those above, the model has no such experts, accelerate manages where its
            weights are, or a temporary change is asked for with `device_experts` or of a model that is not on the CPU.
            What concerns the model is raised on entering a temporary change, as is the next.
        HostMemoryError: host memory would not suffice.

    Example:
        >>> print(move_experts_to_host(model, 4))
        >>> model.to("cuda")

        >>> with move_experts_to_host(model, 4, temporary=True):
        ...     model.generate(**inputs, cache=cache)
    """
    width = None if bits is None else Width.checked(bits, group_size)
    device_experts = checked_integer("device_experts", device_experts)
    if device_experts < 0:
        raise ValueError(f"device_experts must not be negative, got {device_experts}. 0 keeps all in host memory.")
    if checked_bool("temporary", temporary):
        if device_experts:
            raise ValueError(
                f"temporary=True is for a model on the CPU, and device_experts={device_experts} is for one on a "
                "device. Leave one of them out."
            )
        return _temporarily(model, width)
    require_own_weights(model, "move its experts, then use model.to(device)")
    if any(weight.is_meta for module in require_experts(model).values() for weight in module.parameters()):
        raise ValueError("Weights are on meta: load the model's weights first.")
    report = WeightsReport()
    before = use_chosen_experts(model)
    try:
        if width is not None:
            covered, report = _prepared(model, width)
            quantize_permanently(covered, width, report)
        _let_stay(model, device_experts)
    except BaseException:
        model.set_experts_implementation(before)
        raise
    return _completed(report, model)


@contextmanager
def _temporarily(model: PreTrainedModel, width: Width | None) -> Iterator[WeightsReport]:
    _require_cpu(model)
    with chosen_experts_used(model):
        if width is None:
            yield _completed(WeightsReport(), model)
        else:
            covered, report = _prepared(model, width)
            with temporarily_quantized(covered, width, report):
                yield _completed(report, model)


def _let_stay(model: PreTrainedModel, device_experts: int) -> None:
    """Move all weights of experts to host memory, and keep them there when the model is moved."""
    modules = require_experts(model).values()
    elsewhere = [weight for module in modules for weight in module.parameters() if not weight.is_cpu]
    require_host_bytes(sum(weight.nbytes for weight in elsewhere), "Experts in host memory need")
    del elsewhere
    for module in modules:
        for name, weight in module._parameters.items():
            if isinstance(weight, QuantizedWeight):
                weight.stays = True
            elif weight is not None:
                module._parameters[name] = HostWeight.of(weight)
        down: Any = module._parameters["down_proj"]
        down.hot = HotExperts(min(device_experts, module.num_experts)) if device_experts else None


def _require_cpu(model: PreTrainedModel) -> None:
    devices = sorted({parameter.device.type for parameter in model.parameters()} - {"cpu"})
    if devices:
        require_own_weights(model, "then move its experts")
        raise ValueError(
            f"Weights are on {' and '.join(devices)}, and temporary=True needs the whole model on the CPU. Leave it "
            "out to move the experts permanently."
        )


def _prepared(model: PreTrainedModel, width: Width) -> tuple[list[Covered], WeightsReport]:
    """The expert weights that can be quantized, and a report that does not count them yet."""
    modules: set[Any] = set(require_experts(model).values())
    covered, left = coverage(model)
    ours = [each for each in covered if any(module in modules for module, _ in each.holders)]
    names = {id(weight): name for name, weight in model.named_parameters()}
    stacks = {names[id(weight)] for module in modules for weight in module.parameters() if weight.dim() == 3}
    left = {name: reason for name, reason in left.items() if name in stacks}
    require_some(ours, left, model)
    return ours, WeightsReport(*width, left=left)


def _completed(report: WeightsReport, model: PreTrainedModel) -> WeightsReport:
    """The report with the bytes of all weights, and the numbers of the experts, which have been moved."""
    modules: dict[str, Any] = require_experts(model)
    experts = {id(weight): weight for module in modules.values() for weight in module.parameters()}
    report.expert_layers = len(modules)
    report.experts = max(module.num_experts for module in modules.values())
    report.expert_bytes = sum(map(_bytes_of, experts.values()))
    report.other_bytes = sum(map(_bytes_of, model.parameters())) - report.quantized_bytes
    return report


def _bytes_of(weight: Any) -> int:
    num_bytes: int = weight.matrices.num_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes
    return num_bytes
