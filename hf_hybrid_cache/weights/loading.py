"""Quantizing weights while `from_pretrained` loads them, through a quantizer and operations that transformers calls."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..scalars import checked_bool
from ..storage import give_back_file_pages, require_host_bytes
from .chosen_experts import use_chosen_experts_if_any
from .coverage import GROUP_SIZE, HEAD_BITS, Covered, NothingToQuantizeError, Width, coverage, require_some
from .quantized_weight import QuantizedWeight
from .quantized_weights import WeightsReport, refuse_to_load_into_codes, replace_by_codes, report_of

QUANT_METHOD = "hf_hybrid_cache"


class QuantizedWeightsConfig(QuantizationConfigMixin):
    """
    Load a model on the CPU with quantized weights, without ever holding all the original weights.

    The model is the same as after `quantize_weights`, bit for bit. Each weight is quantized as soon as it is read, and
    the original is freed. Experts that the files keep one by one are quantized one by one. The `WeightsReport` is
    `model.hf_quantizer.report`.

    The model cannot be saved or trained. `from_pretrained` refuses checkpoints that are quantized already. The first
    config that a program makes registers this quantizer with transformers.

    Args:
        bits: of a weight, 8 or 4.
        group_size: number of weights in a row that share a scale: 32, 64 or 128.
        head_bits: of a weight of the output head and the embedding that is tied to it, 8 or 4.
        only_experts: quantize only the stacked experts of a mixture-of-experts model.

    Raises:
        TypeError: a number is not an integer, or `only_experts` is not a bool.
        ValueError: a number is not one of those above. `from_pretrained` raises it if the model is to be on another
            device than the CPU, or if none of its weights can be quantized.
        HostMemoryError: from `from_pretrained`, before it reads anything: host memory would not suffice for the codes.

    Example:
        >>> config = QuantizedWeightsConfig(bits=4)
        >>> model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", quantization_config=config)
        >>> print(model.hf_quantizer.report)
    """

    def __init__(self, bits: int, group_size: int = GROUP_SIZE, head_bits: int = HEAD_BITS, only_experts: bool = False):
        self.quant_method = QUANT_METHOD  # type: ignore[assignment] # transformers' own are an enumeration of strings
        self.bits, self.group_size, self.head_bits = Width.checked(bits, group_size, head_bits)
        self.only_experts = checked_bool("only_experts", only_experts)
        if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
            register_quantizer(QUANT_METHOD)(QuantizedWeightsQuantizer)


class QuantizedWeightsQuantizer(HfQuantizer):
    """
    Quantizes weights while `from_pretrained` loads them; transformers makes it for a `QuantizedWeightsConfig`.

    Attributes:
        report: of the model, once it is loaded.
        refused: names of weights that are left to transformers, which refuses their shapes in the files.
    """

    quantization_config: QuantizedWeightsConfig
    is_trainable = False

    def __init__(self, quantization_config: QuantizedWeightsConfig, **settings: Any):
        super().__init__(quantization_config, **settings)
        self.report: WeightsReport | None = None
        self.refused: set[str] = set()
        self._dtype: torch.dtype | None = None
        # While a model is loaded: the weights that are quantized as soon as they are read, and the names in the files.
        self._covered: dict[str, Covered] = {}
        self._in_files: set[str] = set()

    @property
    def width(self) -> Width:
        """The width of the codes; `bits` stand for `head_bits` where only experts are quantized."""
        config = self.quantization_config
        return Width(config.bits, config.group_size, config.bits if config.only_experts else config.head_bits)

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raise a `ValueError` if some weights would, or might, be on another device than the CPU."""
        wanted = set(device_map.values()) if isinstance(device_map, dict) else {device_map} - {None}
        elsewhere = sorted({str(device) for device in wanted} - {"cpu"})
        if elsewhere and (torch.accelerator.is_available() or not _is_only_automatic(elsewhere)):
            raise ValueError(
                f"Quantized weights need the CPU, and device_map names {' and '.join(elsewhere)}: use "
                'device_map="cpu", or leave quantization_config out.'
            )

    def update_device_map(self, device_map: Any) -> Any:
        return {"": torch.device("cpu")} if isinstance(device_map, str) else device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config = self.quantization_config
        with _tied(model):
            covered, left = coverage(model, config.only_experts)
            weights = dict(model.named_parameters(remove_duplicate=False))
        if config.only_experts and not covered:
            raise NothingToQuantizeError(
                f"{type(model).__name__} has no stacked experts: leave only_experts out to quantize all weights."
            )
        require_some(covered, left, model)
        require_host_bytes(
            sum(each.quantized_bytes(self.width) for each in covered), f"Weights in {config.bits} bits need"
        )
        # Transformers reads every weight in the model's dtype. Weights of another dtype are quantized after loading.
        by_parameter = {id(each.parameter): each for each in covered if each.parameter.dtype == self._dtype}
        self._covered = {name: by_parameter[id(each)] for name, each in weights.items() if id(each) in by_parameter}

    def update_weight_conversions(self, weight_conversions: list[Any], *others: Any) -> list[Any]:
        """Quantize experts that the files keep one by one, instead of stacking them first."""
        ours = [self._for_single_experts(conversion) for conversion in weight_conversions]
        conversions: list[Any] = super().update_weight_conversions(ours, *others)
        return conversions

    def _for_single_experts(self, conversion: Any) -> Any:
        if not isinstance(conversion, WeightConverter) or not _stack_single_experts(conversion.operations):
            return conversion
        ours = copy.deepcopy(conversion)
        ours.operations = [QuantizeExperts(self, ours.operations)]
        return ours

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        # Transformers asks this about every name in the files before it reads the first weight.
        self._in_files.add(param_name)
        return param_name in self._covered and param_name not in self.refused

    def get_quantize_ops(self) -> "QuantizeWeights":
        return QuantizeWeights(self)

    def find(self, name: str) -> Covered | None:
        """The weight of that name, if it is to be quantized as soon as it is read."""
        covered = self._covered.get(name)
        in_files = [other for other in self._in_files if self._covered.get(other) is covered]
        # Of a tied weight that the files have under two names transformers compares the two first.
        return covered if len(in_files) < 2 else None

    def quantized(
        self, covered: Covered, matrices: Iterable[torch.Tensor], dtype: torch.dtype
    ) -> QuantizedWeight | None:
        """The quantized weight; `None` if its numbers are not finite, which is reported when the model is loaded."""
        try:
            return covered.quantized(matrices, dtype, self.width)
        except ValueError:
            return None

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        # Transformers 5.17 accepts any shape if there is a quantizer; later versions have raised before this.
        for name in self.refused:
            found, shape = model.get_parameter(name).shape, self._covered[name].parameter.shape
            if found != shape:
                raise ValueError(f"{name} is {list(found)} in the files, and {list(shape)} in the model.")
        self._covered, self._in_files, self.refused = {}, set(), set()
        covered, left = coverage(model, self.quantization_config.only_experts)
        # Still to be quantized: weights missing in the files, tied weights that the files have twice, other dtypes.
        replace_by_codes(covered, left, self.width)
        codes = {name: weight for name, weight in model.named_parameters() if isinstance(weight, QuantizedWeight)}
        left = {name: reason for name, reason in left.items() if name not in codes}
        self.report = report_of(model, list(codes.values()), left, self.width)
        refuse_to_load_into_codes(model)
        use_chosen_experts_if_any(model)
        return model

    def is_serializable(self) -> bool:
        """Raise a `TypeError`: `save_pretrained` asks this before it writes anything."""
        raise TypeError(
            "A model with quantized weights cannot be saved: they are not stored as numbers of their own. Keep the "
            "files that it was loaded from, and load it with the same QuantizedWeightsConfig."
        )


class QuantizeWeights(ConversionOps):
    """Quantizes weights after all other operations on them."""

    def __init__(self, quantizer: QuantizedWeightsQuantizer):
        self._quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], *_: Any, **options: Any) -> dict[str, Any]:
        """Quantize tensors, or lists of one tensor, by name; those that are not to be quantized, or cannot be, stay."""
        tensors = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        results = {name: self._quantized(name, tensor) for name, tensor in tensors.items()}
        for name, result in results.items():
            if isinstance(result, QuantizedWeight):
                module: Any = options["model"].get_submodule(name.rpartition(".")[0])
                if len(list(module.parameters(recurse=False))) == 1:
                    module._is_hf_initialized = True  # Youtu writes to a row of what was loaded otherwise
        return results

    def _quantized(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        covered = self._quantizer.find(name)
        if covered is None or isinstance(tensor, QuantizedWeight):
            return tensor
        if tensor.shape != covered.parameter.shape:
            self._quantizer.refused.add(name)
            return tensor
        matrices = _given_back(covered.as_stack(tensor))
        quantized = self._quantizer.quantized(covered, matrices, tensor.dtype)
        return tensor if quantized is None else quantized


class QuantizeExperts(ConversionOps):
    """Replaces operations that stack a layer's experts: each expert goes through them alone, and is quantized."""

    def __init__(self, quantizer: QuantizedWeightsQuantizer, operations: Sequence[ConversionOps]):
        self._quantizer, self._operations = quantizer, operations

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizeExperts":
        return self  # all converters share one object

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **others: Any) -> dict[str, Any]:
        """Quantize lists of tensors, one for each expert; they are stacked if they are not to be, or cannot be."""

        def through(tensors: dict[str, Any]) -> dict[str, Any]:
            for operation in self._operations:
                tensors = operation.convert(tensors, *patterns, **others)
            return tensors

        def alone(index: int) -> tuple[str, torch.Tensor]:
            ((target, stack),) = through({pattern: [of[index]] for pattern, of in input_dict.items()}).items()
            return target, stack[0]

        def one_by_one(count: int) -> Iterator[torch.Tensor]:
            for index in range(count):
                yield alone(index)[1]
                for of_pattern in input_dict.values():
                    give_back_file_pages(of_pattern[index])

        covered = self._quantizer.find(others["full_layer_name"])
        if covered is not None and covered.is_stacked:
            count, *sizes = covered.parameter.shape
            if all(len(of_pattern) == count for of_pattern in input_dict.values()):
                target, first = alone(0)
                if list(first.shape) == sizes:
                    quantized = self._quantizer.quantized(covered, one_by_one(count), first.dtype)
                    if quantized is not None:
                        return {target: quantized}
        return through(input_dict)


def _stack_single_experts(operations: Sequence[ConversionOps]) -> bool:
    """Whether operations stack a list of matrices, and treat each matrix in the stack as they would treat it alone."""
    first, *others = operations
    return (
        type(first) is MergeModulelist
        and first.dim == 0
        and all(type(each) is Concatenate and each.dim in (1, 2) for each in others)
    )


def _given_back(matrices: torch.Tensor) -> Iterator[torch.Tensor]:
    """Matrices one by one; the file's pages of one are freed after it is used."""
    for matrix in matrices:
        yield matrix
        give_back_file_pages(matrix)


@contextmanager
def _tied(model: PreTrainedModel) -> Iterator[None]:
    """Tie the weights of an empty model, as they will be when it is loaded, until the block ends."""
    own: list[tuple[torch.nn.Module, str, Any]] = []
    try:
        for target, source in model.all_tied_weights_keys.items():
            path, _, attribute = target.rpartition(".")
            module = model.get_submodule(path)
            own.append((module, attribute, module._parameters[attribute]))
            module._parameters[attribute] = model.get_parameter(source)
        yield
    finally:
        for module, attribute, parameter in reversed(own):
            module._parameters[attribute] = parameter


def _is_only_automatic(devices: list[str]) -> bool:
    """Whether transformers is to choose the devices; it takes the CPU where there is nothing else."""
    return set(devices) <= {"auto", "balanced", "balanced_low_0", "sequential"}
