"""Keeping the experts of a mixture-of-experts model in host memory, permanently or inside a `with` block."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, overload

from transformers import PreTrainedModel

from ..storage import require_host_bytes
from .chosen_experts import use_chosen_experts
from .coverage import GROUP_SIZE, Width, coverage, require_some
from .expert_layers import require_experts
from .quantized_weight import HostWeight, QuantizedWeight
from .quantized_weights import (
    WeightsReport,
    bytes_of,
    carried_out,
    refuse_to_load_into_codes,
    replace_by_codes,
    report_of,
    require_cpu,
    require_own_weights,
)


@overload
def move_experts_to_host(
    model: PreTrainedModel,
    bits: int | None = ...,
    group_size: int = ...,
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
    *,
    temporary: bool = False,
) -> WeightsReport | AbstractContextManager[WeightsReport]:
    """
    Keep the experts of a mixture-of-experts model in host memory and compute them on the CPU.

    A kernel reads only the experts that a token has chosen, one call for a layer. In a prompt, torch multiplies the
    experts that many tokens have chosen.

    Weights whose columns come before rows in memory (gpt-oss) are laid out anew, one after the other, unless the change
    is temporary: then torch multiplies them.

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
        temporary: change the model inside a `with` block only.

    Returns:
        A report of the experts and their bytes. With `temporary=True`, a context manager that gives the report.

    Raises:
        TypeError: a number is not an integer, or `temporary` is not a bool.
        ValueError: a number is not one of those above, the model has no such experts, accelerate manages where its
            weights are, or a temporary change is asked for of a model that is not on the CPU. What concerns the model
            is raised on entering a temporary change, as is the next.
        HostMemoryError: host memory would not suffice.

    Example:
        >>> print(move_experts_to_host(model, 4))
        >>> model.to("cuda")

        >>> with move_experts_to_host(model, 4, temporary=True):
        ...     model.generate(**inputs, cache=cache)
    """
    width = None if bits is None else Width.checked(bits, group_size)

    def change(undo: ExitStack) -> WeightsReport:
        if temporary:
            require_cpu(
                model,
                "then move its experts",
                ", and temporary=True needs the whole model on the CPU. Leave it out to move the experts permanently.",
            )
        else:
            require_own_weights(model, "move its experts, then use model.to(device)")
        modules = require_experts(model).values()
        if any(weight.is_meta for module in modules for weight in module.parameters()):
            raise ValueError("Weights are on meta: load the model's weights first.")
        use_chosen_experts(model, undo)
        codes: list[QuantizedWeight] = []
        left: dict[str, str] = {}
        if width is not None:
            covered, left = coverage(model, only_experts=True)
            require_some(covered, left, model)
            codes = replace_by_codes(covered, left, width, undo if temporary else None)
            refuse_to_load_into_codes(model, undo)
        if not temporary:
            _let_stay(modules)
        report = report_of(model, codes, left, width)
        report.expert_layers = len(modules)
        report.experts = max(module.num_experts for module in modules)
        report.expert_bytes = sum(map(bytes_of, _weights_of(modules)))
        return report

    return carried_out(change, temporary)


def _let_stay(modules: Iterable[Any]) -> None:
    """Move all weights of experts to host memory, and keep them there when the model is moved."""
    # One after the other is laid out in rows, which kernels read.
    transposed = _weights_of(each for each in modules if each.is_transposed)
    laid_out = [weight.nbytes for weight in transposed if not isinstance(weight, QuantizedWeight)]
    moved = sum(weight.nbytes for weight in _weights_of(modules) if not weight.is_cpu)
    require_host_bytes(moved + max(laid_out, default=0), "Experts in host memory need")
    for module in modules:
        for name, weight in module._parameters.items():
            if isinstance(weight, QuantizedWeight):
                weight.stays = True
            elif weight is not None:
                numbers = weight.detach().to("cpu")
                if module.is_transposed and numbers.dim() == 3:
                    numbers = numbers.mT.contiguous().mT
                module._parameters[name] = HostWeight(numbers, requires_grad=False)


def _weights_of(modules: Iterable[Any]) -> Iterable[Any]:
    """The parameters of modules, each once."""
    return {id(weight): weight for module in modules for weight in module.parameters()}.values()
