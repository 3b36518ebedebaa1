"""Quantizing weights while `from_pretrained` loads them: the config, and the quantizer that transformers asks."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..storage import require_host_bytes
from .coverage import NothingToQuantizeError, coverage
from .experts_implementation import use_chosen_experts_if_any
from .loading_operations import QuantizeExperts, QuantizeWeights, WeightsToQuantize, stack_single_experts
from .quantized_weight import QuantizedWeight
from .quantized_weights import quantize_each, require_some
from .report import WeightsReport
from .width import GROUP_SIZE, HEAD_BITS, Width, checked_bool

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
    """

    quantization_config: QuantizedWeightsConfig
    is_trainable = False

    def __init__(self, quantization_config: QuantizedWeightsConfig, **settings: Any):
        super().__init__(quantization_config, **settings)
        self.report: WeightsReport | None = None
        self._dtype: torch.dtype | None = None
        self._weights = WeightsToQuantize(self.width)

    @property
    def width(self) -> Width:
        """The width of the codes; `bits` stand for `head_bits` where only experts are quantized."""
        config = self.quantization_config
        return Width(config.bits, config.group_size, config.bits if config.only_experts else config.head_bits)

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """
        Refuse devices other than the CPU.

        Raises:
            ValueError: some weights would, or might, be on another device.
        """
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
            covered, left = coverage(model)
            names = dict(model.named_parameters(remove_duplicate=False))
        if config.only_experts:
            covered = [each for each in covered if each.is_stacked]
            if not covered:
                raise NothingToQuantizeError(
                    f"{type(model).__name__} has no stacked experts: leave only_experts out to quantize all weights."
                )
        require_some(covered, left, model)
        require_host_bytes(
            sum(each.quantized_bytes(self.width) for each in covered), f"Weights in {config.bits} bits need"
        )
        # Transformers reads every weight in the model's dtype. Weights of another dtype are quantized after loading.
        by_parameter = {id(each.parameter): each for each in covered if each.parameter.dtype == self._dtype}
        by_name = {name: by_parameter[id(weight)] for name, weight in names.items() if id(weight) in by_parameter}
        self._weights.reset(by_name)

    def update_weight_conversions(self, weight_conversions: list[Any], *others: Any) -> list[Any]:
        """Quantize experts that the files keep one by one, instead of stacking them first."""
        ours = [self._for_single_experts(conversion) for conversion in weight_conversions]
        conversions: list[Any] = super().update_weight_conversions(ours, *others)
        return conversions

    def _for_single_experts(self, conversion: Any) -> Any:
        if not isinstance(conversion, WeightConverter) or not stack_single_experts(conversion.operations):
            return conversion
        ours = copy.deepcopy(conversion)
        ours.operations = [QuantizeExperts(ours.operations, self._weights)]
        return ours

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        # Transformers asks this about every name in the files before it reads the first weight.
        return self._weights.note_in_files(param_name)

    def get_quantize_ops(self) -> QuantizeWeights:
        return QuantizeWeights(self._weights)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        config = self.quantization_config
        # Transformers 5.17 accepts any shape if there is a quantizer; later versions have raised before this.
        for name, shape in self._weights.refused_shapes.items():
            found = model.get_parameter(name).shape
            if found != shape:
                raise ValueError(f"{name} is {list(found)} in the files, and {list(shape)} in the model.")
        self._weights.reset({})
        covered, left = coverage(model)
        if config.only_experts:
            covered = [each for each in covered if each.is_stacked]
            stacked = {name for name, weight in model.named_parameters() if weight.dim() == 3}
            left = {name: reason for name, reason in left.items() if name in stacked}
        weights = list(model.parameters())
        done = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        ours = {id(weight) for weight in (*done, *(each.parameter for each in covered))}
        names = {name for name, weight in model.named_parameters() if isinstance(weight, QuantizedWeight)}
        report = WeightsReport(
            *self.width,
            quantized_weights=len(done),
            original_bytes=sum(weight.nbytes for weight in done),
            quantized_bytes=sum(weight.matrices.num_bytes for weight in done),
            other_bytes=sum(weight.nbytes for weight in weights if id(weight) not in ours),
            left={name: reason for name, reason in left.items() if name not in names},
        )
        del weights
        # Still to be quantized: weights missing in the files, tied weights that the files have twice, other dtypes.
        quantize_each(covered, self.width, report)
        use_chosen_experts_if_any(model)
        self.report = report
        return model

    def is_serializable(self) -> bool:
        """
        Refuse to be saved; `save_pretrained` asks this before it writes anything.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "A model with quantized weights cannot be saved: they are not stored as numbers of their own. Keep the "
            "files that it was loaded from, and load it with the same QuantizedWeightsConfig."
        )


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
