"""Quantizing the weights of a model, permanently or inside a `with` block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..scalars import checked_bool
from ..storage import require_host_bytes
from .chosen_experts import use_chosen_experts_if_any
from .coverage import GROUP_SIZE, HEAD_BITS, Covered, Width, coverage, require_some
from .quantized_weight import QuantizedWeight, ReadOnlyWeightError

# A progress bar appears after so many seconds.
_WORTH_A_BAR = 1.0


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

    def change(undo: ExitStack) -> WeightsReport:
        require_cpu(
            model,
            f"or with quantization_config=QuantizedWeightsConfig(bits={width.bits})",
            "; quantized weights need the CPU. Use model.to('cpu'), or decode there with "
            f"custom_generate=DecodeOnCPU(weights={width.bits}).",
        )
        covered, left = coverage(model)
        require_some(covered, left, model)
        codes = replace_by_codes(covered, left, width, undo if temporary else None)
        refuse_to_load_into_codes(model, undo)
        use_chosen_experts_if_any(model, undo)
        return report_of(model, codes, left, width)

    return carried_out(change, temporary)


def carried_out(
    change: Callable[[ExitStack], WeightsReport], temporary: bool
) -> WeightsReport | AbstractContextManager[WeightsReport]:
    """Change a model now, or inside a `with` block; `change` notes what undoes it, after an error or at the end."""
    if checked_bool("temporary", temporary):
        return _inside_block(change)
    with ExitStack() as undo:
        report = change(undo)
        undo.pop_all()
    return report


@contextmanager
def _inside_block(change: Callable[[ExitStack], WeightsReport]) -> Iterator[WeightsReport]:
    with ExitStack() as undo:
        yield change(undo)


def replace_by_codes(
    covered: list[Covered], left: dict[str, str], width: Width, undo: ExitStack | None = None
) -> list[QuantizedWeight]:
    """
    Put quantized weights into the modules, and the names of those that cannot be quantized into `left`.

    With `undo` the parameters stay in memory, and are back when it ends. Without it each is freed as soon as its codes
    are made: `covered` is emptied.

    Raises:
        HostMemoryError: host memory would not suffice, for all codes beside the parameters or for the largest codes.
    """
    sizes = [each.quantized_bytes(width) for each in covered]
    require_host_bytes(max(sizes, default=0) if undo is None else sum(sizes), f"Weights in {width.bits} bits need")
    codes: list[QuantizedWeight] = []
    kept: list[Covered] = []
    if undo is not None:
        undo.callback(_put_back, kept)
        undo.callback(_put_back, kept)  # a second Ctrl-C may interrupt the first time
    with quantization_bar(len(covered), width.bits) as bar:
        while covered:
            each = covered.pop(0)
            try:
                data = each.parameter.data.to("cpu")
                codes.append(each.quantized(each.as_stack(data), data.dtype, width))
            except ValueError as error:
                left[each.name] = str(error)
            else:
                if undo is not None:
                    kept.append(each)
                each.hold(codes[-1])
            bar.update()
    return codes


def refuse_to_load_into_codes(model: PreTrainedModel, undo: ExitStack | None = None) -> None:
    """Let `load_state_dict` refuse, before it copies anything, what it would copy into codes, until `undo` ends."""
    hook = model.register_load_state_dict_pre_hook(_require_no_codes)
    if undo is not None:
        undo.callback(hook.remove)


def _require_no_codes(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    weights = () if metadata.get("assign_to_params_buffers") else module.named_parameters(remove_duplicate=False)
    codes = [name for name, weight in weights if isinstance(weight, QuantizedWeight) and prefix + name in state_dict]
    if codes:
        raise ReadOnlyWeightError(f"{len(codes)} weights of the state dict are quantized here, {codes[0]} among them")


def _put_back(kept: list[Covered]) -> None:
    for each in kept:
        each.hold(each.parameter)


def report_of(
    model: PreTrainedModel, codes: list[QuantizedWeight], left: dict[str, str], width: Width | None
) -> WeightsReport:
    """Report what `codes` have replaced in a model, and what is `left`; `width` is `None` if nothing was to be."""
    quantized_bytes = sum(map(bytes_of, codes))
    report = WeightsReport(
        quantized_weights=len(codes),
        original_bytes=sum(weight.nbytes for weight in codes),
        quantized_bytes=quantized_bytes,
        other_bytes=sum(map(bytes_of, model.parameters())) - quantized_bytes,
        left=left,
    )
    if width is not None:
        report.bits, report.group_size, report.head_bits = width
    return report


def bytes_of(weight: Any) -> int:
    """Bytes that a parameter takes; of a quantized weight, those of its codes."""
    num_bytes: int = weight.matrices.num_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes
    return num_bytes


def quantization_bar(num_weights: int, bits: int | None) -> Any:
    """
    A progress bar on a terminal or in a notebook, where quantizing takes long and transformers' progress bars are on.

    Without `bits` there is none.
    """
    text, is_off = f"Weights in {bits} bits", True if bits is None else None
    return logging.tqdm(total=num_weights, desc=text, delay=_WORTH_A_BAR, leave=False, disable=is_off)


def require_cpu(model: PreTrainedModel, then: str, why: str) -> None:
    """Raise a `ValueError` if a model is not on the CPU; `then` and `why` end what it says."""
    devices = sorted({parameter.device.type for parameter in model.parameters()} - {"cpu"})
    if devices:
        require_own_weights(model, then)
        raise ValueError(f"Weights are on {' and '.join(devices)}{why}")


def require_own_weights(model: PreTrainedModel, then: str) -> None:
    """Raise a `ValueError` if accelerate manages where the weights are; `then` ends the way out."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            "accelerate manages where this model's weights are (several devices, or offloading). Load it onto the CPU, "
            f"without device_map, {then}."
        )
