"""Quantizing the weights of a model, permanently or inside a `with` block."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, overload

from transformers import PreTrainedModel
from transformers.utils import logging

from ..storage import require_host_bytes
from .coverage import Covered, NothingToQuantizeError, coverage
from .experts_implementation import chosen_experts_if_any, use_chosen_experts_if_any
from .quantized_weight import QuantizedWeight
from .report import WeightsReport
from .width import GROUP_SIZE, HEAD_BITS, Width, checked_bool

# A progress bar appears after so many seconds.
_WORTH_A_BAR = 1.0


@overload
def quantize_weights(
    model: PreTrainedModel,
    bits: int,
    group_size: int = ...,
    head_bits: int = ...,
    *,
    temporary: Literal[False] = ...,
) -> WeightsReport: ...


@overload
def quantize_weights(
    model: PreTrainedModel, bits: int, group_size: int = ..., head_bits: int = ..., *, temporary: Literal[True]
) -> AbstractContextManager[WeightsReport]: ...


def quantize_weights(
    model: PreTrainedModel,
    bits: int,
    group_size: int = GROUP_SIZE,
    head_bits: int = HEAD_BITS,
    *,
    temporary: bool = False,
) -> WeightsReport | AbstractContextManager[WeightsReport]:
    """
    Quantize the weights of a model on the CPU.

    Linear layers, the output head, the token embedding and stacked experts are quantized. Generating a token takes a
    half to a quarter of the time, because reading weights is most of it. Quantizing takes a few seconds for a billion
    weights.

    By default the change is permanent: each weight is freed as soon as its codes are made, and the model cannot be
    saved or trained afterwards. An interrupted call leaves some weights quantized. With `temporary=True` the result is
    a context manager: the weights are quantized when it is entered, the originals stay in memory beside the codes, and
    the model has the very same parameters again when the block ends, however it ends.

    Args:
        model: all of it in host memory.
        bits: of a weight, 8 or 4.
        group_size: number of weights in a row that share a scale: 32, 64 or 128. A scale takes 32 bits.
        head_bits: of a weight of the output head and the embedding that is tied to it, 8 or 4. Errors there are errors
            of the logits; 4 bits take less memory and time.
        temporary: quantize inside a `with` block only.

    Returns:
        A report that names the matrices that were not quantized. With `temporary=True`, a context manager that gives
        the report.

    Raises:
        TypeError: a number is not an integer, or `temporary` is not a bool.
        ValueError: a number is not one of those above, the model is not on the CPU, or none of its weights can be
            quantized. Like the next, it is raised on entering a temporary change.
        HostMemoryError: host memory would not suffice.

    Example:
        >>> print(quantize_weights(model, 4))

        >>> with quantize_weights(model, 4, temporary=True) as report:
        ...     model.generate(**inputs, cache=cache)
    """
    width = Width.checked(bits, group_size, head_bits)
    if checked_bool("temporary", temporary):
        return _temporarily(model, width)
    covered, report = _prepared(model, width)
    quantize_permanently(covered, width, report)
    use_chosen_experts_if_any(model)
    return report


@contextmanager
def _temporarily(model: PreTrainedModel, width: Width) -> Iterator[WeightsReport]:
    covered, report = _prepared(model, width)
    with temporarily_quantized(covered, width, report), chosen_experts_if_any(model):
        yield report


@contextmanager
def temporarily_quantized(covered: list[Covered], width: Width, report: WeightsReport) -> Iterator[None]:
    """
    Put quantized weights into the modules, and the modules' own parameters back when the block ends.

    Raises:
        HostMemoryError: host memory would not suffice for the codes beside the parameters.
    """
    require_host_bytes(sum(each.quantized_bytes(width) for each in covered), f"Weights in {width.bits} bits need")
    pairs = list(_quantized_one_by_one(covered, width, report))
    try:
        try:
            for each, twin in pairs:
                each.hold(twin)
            yield
        finally:
            _hold_originals(pairs)
    except BaseException:
        _hold_originals(pairs)  # a second Ctrl-C may have interrupted the first attempt
        raise


def quantize_permanently(covered: list[Covered], width: Width, report: WeightsReport) -> None:
    """
    Put quantized weights into the modules; each parameter is freed as soon as its codes are made.

    Raises:
        HostMemoryError: host memory would not suffice for the codes of the largest weight.
    """
    require_host_bytes(max(each.quantized_bytes(width) for each in covered), f"Weights in {width.bits} bits need")
    quantize_each(covered, width, report)


def quantize_each(covered: list[Covered], width: Width, report: WeightsReport) -> None:
    """Do the same without checking host memory; `covered` may be empty."""
    for each, twin in _quantized_one_by_one(covered, width, report):
        each.hold(twin)


def _hold_originals(pairs: list[tuple[Covered, QuantizedWeight]]) -> None:
    for each, _ in pairs:
        each.hold(each.parameter)


def quantization_bar(num_weights: int, bits: int | None) -> Any:
    """
    A progress bar on a terminal or in a notebook, where quantizing takes long and transformers' progress bars are on.

    Args:
        num_weights: number of weights that will be quantized.
        bits: of a code; `None` for no bar.
    """
    text = f"Weights in {bits} bits"
    return logging.tqdm(
        total=num_weights, desc=text, delay=_WORTH_A_BAR, leave=False, disable=True if bits is None else None
    )


def require_own_weights(model: PreTrainedModel, then: str) -> None:
    """
    Check that accelerate does not manage where the model's weights are.

    Args:
        model: any model.
        then: end of the advice to load the model onto the CPU.

    Raises:
        ValueError: accelerate manages them.
    """
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            "accelerate manages where this model's weights are (several devices, or offloading). Load it onto the CPU, "
            f"without device_map, {then}."
        )


def require_some(covered: list[Covered], left: dict[str, str], model: PreTrainedModel) -> None:
    """
    Check that at least one weight can be quantized.

    Raises:
        NothingToQuantizeError: there is none.
    """
    if not covered:
        reasons = "; ".join(f"{name} {reason}" for name, reason in list(left.items())[:3])
        raise NothingToQuantizeError(
            f"No weight of {type(model).__name__} can be quantized: {reasons or 'it has no matrices'}."
        )


def _prepared(model: PreTrainedModel, width: Width) -> tuple[list[Covered], WeightsReport]:
    devices = sorted({parameter.device.type for parameter in model.parameters()} - {"cpu"})
    if devices:
        require_own_weights(model, f"or with quantization_config=QuantizedWeightsConfig(bits={width.bits})")
        raise ValueError(
            f"Weights are on {' and '.join(devices)}; quantized weights need the CPU. Use model.to('cpu'), "
            f"or decode there with custom_generate=DecodeOnCPU(weights={width.bits})."
        )
    covered, left = coverage(model)
    require_some(covered, left, model)
    ours = {id(each.parameter) for each in covered}
    others = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in ours)
    return covered, WeightsReport(*width, other_bytes=others, left=left)


def _quantized_one_by_one(
    covered: list[Covered], width: Width, report: WeightsReport
) -> Iterator[tuple[Covered, QuantizedWeight]]:
    """Weights with their quantized twins, counted in the report. It empties `covered`, so that weights can be freed."""
    with quantization_bar(len(covered), width.bits) as bar:
        while covered:
            each = covered.pop(0)
            num_bytes = each.parameter.nbytes
            try:
                twin = each.quantized(each.parameter.data.to("cpu"), width)
            except ValueError as error:
                report.left[each.name] = str(error)
                report.other_bytes += num_bytes
            else:
                report.quantized_weights += 1
                report.original_bytes += num_bytes
                report.quantized_bytes += twin.matrices.num_bytes
                yield each, twin
                del twin
            del each
            bar.update()
