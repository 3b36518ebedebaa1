"""What transformers asks while it loads a model whose weights are to be coded."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.base import HfQuantizer

from ..storage import require_host_bytes
from .coded_weight import CodedWeight
from .coverage import Covered, NothingToCodeError, coverage
from .experts_implementation import use_chosen_experts_if_any
from .loading_operations import CodeExperts, CodeWeights, are_of_single_experts
from .quantized_weights import WeightsReport, code_each, require_some
from .width import Width

if TYPE_CHECKING:
    from .loading_config import CodedWeightsConfig

QUANT_METHOD = "hf_hybrid_cache"


class CodedWeightsQuantizer(HfQuantizer):
    """
    Codes weights while `from_pretrained` loads them; made by transformers for a `CodedWeightsConfig`.

    Attributes:
        report: what was done, once the model is loaded.
    """

    quantization_config: "CodedWeightsConfig"
    is_trainable = False

    def __init__(self, quantization_config: "CodedWeightsConfig", **settings: Any):
        super().__init__(quantization_config, **settings)
        self.report: WeightsReport | None = None
        self._dtype: torch.dtype | None = None
        # Of the model that is being loaded: what is to be coded, by each name of it, and what files have.
        self._covered: dict[str, Covered] = {}
        self._in_files: set[str] = set()
        # Of what has another shape in the files, that of the model.
        self._shapes: dict[str, torch.Size] = {}

    @property
    def width(self) -> Width:
        """Of the codes; without an output head that is coded, its bits are those of the others."""
        config = self.quantization_config
        return Width(config.bits, config.group_size, config.bits if config.only_experts else config.head_bits)

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """
        Refuse devices other than the CPU.

        Raises:
            ValueError: weights would be elsewhere, or might be.
        """
        wanted = set(device_map.values()) if isinstance(device_map, dict) else {device_map} - {None}
        elsewhere = sorted({str(device) for device in wanted} - {"cpu"})
        if elsewhere and (torch.accelerator.is_available() or not _is_only_automatic(elsewhere)):
            raise ValueError(
                f"Weights of few bits need the CPU, and device_map names {' and '.join(elsewhere)}: use "
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
                raise NothingToCodeError(
                    f"{type(model).__name__} has no stacked experts: leave only_experts out to code all its weights."
                )
        require_some(covered, left, model)
        require_host_bytes(sum(each.coded_bytes(self.width) for each in covered), f"Weights in {config.bits} bits need")
        # What has a type of its own would be read in the model's; it is coded when all is loaded.
        by_parameter = {id(each.parameter): each for each in covered if each.parameter.dtype == self._dtype}
        self._covered = {name: by_parameter[id(weight)] for name, weight in names.items() if id(weight) in by_parameter}
        self._in_files, self._shapes = set(), {}

    def update_weight_conversions(self, weight_conversions: list[Any], *others: Any) -> list[Any]:
        """Experts that files keep one by one are coded one by one, instead of being stacked before."""
        ours = [self._for_single_experts(conversion) for conversion in weight_conversions]
        conversions: list[Any] = super().update_weight_conversions(ours, *others)
        return conversions

    def _for_single_experts(self, conversion: Any) -> Any:
        if not isinstance(conversion, WeightConverter) or not are_of_single_experts(conversion.operations):
            return conversion
        ours = copy.deepcopy(conversion)
        ours.operations = [CodeExperts(ours.operations, self)]
        return ours

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        # Asked of every name that files have, before the first is read.
        self._in_files.add(param_name)
        return param_name in self._covered and param_name not in self._shapes

    def get_quantize_ops(self) -> CodeWeights:
        return CodeWeights(self)

    def to_be_coded(self, name: str) -> Covered | None:
        """
        What is known of a weight that is to be coded as soon as it is read.

        Where files have two names of a tied weight, transformers compares them first.
        """
        covered = self._covered.get(name)
        if covered is None:
            return None
        in_files = [other for other in self._in_files if self._covered.get(other) is covered]
        return covered if len(in_files) < 2 else None

    def leave(self, name: str) -> None:
        """Leave a weight to transformers, which refuses it: it has another shape in the files."""
        self._shapes[name] = self._covered[name].parameter.shape

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        config = self.quantization_config
        # Transformers 5.17 takes a weight of any shape if there is a quantizer, later versions have refused it by now.
        for name, shape in self._shapes.items():
            found = model.get_parameter(name).shape
            if found != shape:
                raise ValueError(f"{name} is {list(found)} in the files, and {list(shape)} in the model.")
        self._covered, self._in_files, self._shapes = {}, set(), {}
        covered, left = coverage(model)
        if config.only_experts:
            covered = [each for each in covered if each.is_stacked]
            stacked = {name for name, weight in model.named_parameters() if weight.dim() == 3}
            left = {name: reason for name, reason in left.items() if name in stacked}
        weights = list(model.parameters())
        done = [weight for weight in weights if isinstance(weight, CodedWeight)]
        ours = {id(weight) for weight in (*done, *(each.parameter for each in covered))}
        names = {name for name, weight in model.named_parameters() if isinstance(weight, CodedWeight)}
        report = WeightsReport(
            *self.width,
            coded_weights=len(done),
            original_bytes=sum(weight.nbytes for weight in done),
            coded_bytes=sum(weight.matrices.num_bytes for weight in done),
            other_bytes=sum(weight.nbytes for weight in weights if id(weight) not in ours),
            left={name: reason for name, reason in left.items() if name not in names},
        )
        del weights
        # What files did not have, what is tied although they have it twice, what has another type, and what cannot be.
        code_each(covered, self.width, report)
        use_chosen_experts_if_any(model)
        self.report = report
        return model

    def is_serializable(self) -> bool:
        """
        Asked by `save_pretrained`, before it writes anything.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "A model with weights of few bits cannot be saved: they are not stored as numbers of their own. Keep the "
            "files that it was loaded from, and load it with the same CodedWeightsConfig."
        )


@contextmanager
def _tied(model: PreTrainedModel) -> Iterator[None]:
    """For a while, weights of an empty model are tied as they will be when it is loaded."""
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
    """Whether devices are left to transformers, which takes the CPU where there is nothing else."""
    return set(devices) <= {"auto", "balanced", "balanced_low_0", "sequential"}
