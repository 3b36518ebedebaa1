"""Moving a model's weights between its device and host memory, while its modules and parameters stay the same."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..model_identity import tensor_digests
from ..storage import require_host_bytes
from ..weights import QUANTIZED_DTYPES, Covered, Width, coverage, quantization_bar, require_some

HOST = torch.device("cpu")


@dataclass(frozen=True)
class HostCopy:
    """
    The copy of one weight in host memory.

    Attributes:
        data: the numbers that decoding reads, perhaps quantized.
        original: the weight before it was converted or quantized, if it cannot be computed from `data` and the host has
            no other copy; otherwise `None`.
        fingerprint: of the weight that was copied.
    """

    data: torch.Tensor
    original: torch.Tensor | None
    fingerprint: tuple


@dataclass
class Weight:
    """
    One weight on the device and in host memory.

    Attributes:
        tensor: the module's own tensor.
        on_device: its data on the device; `None` while it is not there.
        device_dtype: of the data on the device.
        host: its copy in host memory.
        covered: the parameter and the modules that hold it, if the copy is quantized; otherwise `None`.
    """

    tensor: torch.Tensor
    on_device: torch.Tensor | None
    device_dtype: torch.dtype
    host: HostCopy
    covered: Covered | None = None


class MovableWeights:
    """
    A model's weights on its device and their copies in host memory; the model computes with either.

    Parameters and buffers stay the same objects, so ties, optimizers and references to them remain valid. Only their
    data is exchanged; quantized weights take the place of parameters in the modules. Buffers that are not in a
    checkpoint, such as rotary frequencies, keep their dtype.

    Args:
        model: a model with all weights on one device; making this object does not change it.
        dtype: in host memory, of weights that have the model's dtype; `None` for no change.
        restores: whether the weights will go back to the device, exactly as they were.
        kept: copies of an earlier call by name; copies that are still valid are used, and new ones are added.
        width: of the weights that can be quantized, in host memory; `None` for all weights as they are.

    Raises:
        HostMemoryError: host memory would not suffice for the copies.
        ValueError: no weight can be quantized, or one that can be has numbers that are not finite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        restores: bool = True,
        kept: dict[str, HostCopy] | None = None,
        width: Width | None = None,
    ):
        self.device = model.device
        self._model = model
        self._restores = restores
        self._width = width
        dtype_of = _target_dtypes(model, dtype)
        covered = {} if width is None else _covered(model, dtype_of)
        with _plain_tensors():
            weights = _weights_of(model)
            prints: dict[str, tuple] = dict.fromkeys(weights, ())
            if kept is not None:
                prints = dict(zip(weights, _fingerprints(weights.values()), strict=True))
            kept = {} if kept is None else kept
            for name in [name for name, copy in kept.items() if prints.get(name) != copy.fingerprint]:
                del kept[name]
            missing = [(name, tensor) for name, tensor in weights.items() if name not in kept]
            targets = {name: (dtype_of(name, tensor), covered.get(name)) for name, tensor in missing}
            num_bytes = sum(self._host_bytes(tensor, *targets[name]) for name, tensor in missing)
            require_host_bytes(num_bytes, "Weights to decode with on the CPU need")
            with quantization_bar(len(missing), None if width is None else width.bits) as bar:
                for name, tensor in missing:
                    kept[name] = self._host_copy(tensor, prints[name], *targets[name])
                    bar.update()
            self._weights = [
                Weight(tensor, tensor.data, tensor.dtype, kept[name], covered.get(name))
                for name, tensor in weights.items()
            ]

    def use_device(self) -> None:
        """Make the model compute with the weights on its own device, which must be loaded there."""
        with _plain_tensors():
            for weight in self._weights:
                assert weight.on_device is not None
                _exchange(weight.tensor, weight.on_device)
                if weight.covered is not None:
                    weight.covered.hold(weight.covered.parameter)
            self._move_other_buffers(self.device)

    def use_host(self) -> None:
        """Make the model compute with the weights in host memory."""
        with _plain_tensors():
            for weight in self._weights:
                if weight.covered is not None:
                    weight.covered.hold(weight.host.data)
                    _exchange(weight.tensor, self._aside(weight))
                else:
                    _exchange(weight.tensor, weight.host.data)
            self._move_other_buffers(HOST)

    def free_device(self) -> None:
        """Free the device's memory; the host's copies must be in use. Originals that are in host memory stay."""
        if self.device.type != "cpu" or not self._restores:
            for weight in self._weights:
                weight.on_device = None
        give_back = getattr(getattr(torch, self.device.type, None), "empty_cache", None)
        if give_back is not None:
            give_back()

    def load_to_device(self) -> None:
        """
        Copy the weights to the device again, bit by bit as they were, without using them yet.

        Raises:
            torch.OutOfMemoryError: the device has no room for them; `free_device` frees the part that was copied.
        """
        with _plain_tensors():
            for weight in self._weights:
                if weight.on_device is None:
                    source = weight.host.data if weight.host.original is None else weight.host.original
                    # Converted in the host: the device may have room for the smaller dtype only.
                    weight.on_device = source.to(weight.device_dtype).to(self.device)

    def _aside(self, weight: Weight) -> torch.Tensor:
        """The data of a parameter while the modules hold a quantized weight in its place."""
        if self.device.type == "cpu" and weight.on_device is not None:
            return weight.on_device
        return torch.empty(0, dtype=weight.device_dtype) if weight.host.original is None else weight.host.original

    def _host_bytes(self, tensor: torch.Tensor, dtype: torch.dtype, covered: Covered | None) -> int:
        new = 0 if tensor.device.type == "cpu" and dtype == tensor.dtype else tensor.numel() * dtype.itemsize
        if covered is not None:
            assert self._width is not None
            new = covered.quantized_bytes(self._width)
        return new + (tensor.nbytes if self._needs_original(tensor, dtype, covered) else 0)

    def _needs_original(self, tensor: torch.Tensor, dtype: torch.dtype, covered: Covered | None) -> bool:
        loses = covered is not None or torch.promote_types(tensor.dtype, dtype) != dtype
        return loses and self._restores and tensor.device.type != "cpu"

    def _host_copy(
        self, tensor: torch.Tensor, fingerprint: tuple, dtype: torch.dtype, covered: Covered | None
    ) -> HostCopy:
        # Converted in the host: the device may have no room for both.
        original = tensor.data.to(HOST)
        data = original.to(dtype)
        if covered is not None:
            assert self._width is not None
            try:
                data = covered.quantized(data, self._width)
            except ValueError as error:
                raise ValueError(f"{covered.name} {error}. Use weights=None.") from None
        return HostCopy(data, original if self._needs_original(tensor, dtype, covered) else None, fingerprint)

    def _move_other_buffers(self, device: torch.device) -> None:
        # Found anew each time: rotary embeddings that scale with the length replace their buffers in a forward pass.
        weights = {id(weight.tensor) for weight in self._weights}
        for buffer in self._model.buffers():
            if id(buffer) not in weights:
                _exchange(buffer, buffer.data.to(device))


def _weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The parameters, and the buffers that are in a checkpoint, by name; tied ones once."""
    in_checkpoint = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) in in_checkpoint}
    return dict(model.named_parameters()) | buffers


def _covered(model: PreTrainedModel, dtype_of: Callable[[str, torch.Tensor], torch.dtype]) -> dict[str, Covered]:
    """The parameters that will be quantized, by name."""
    covered, left = coverage(model)
    covered = [each for each in covered if dtype_of(each.name, each.parameter) in QUANTIZED_DTYPES]
    require_some(covered, left, model)
    return {each.name: each for each in covered}


def _target_dtypes(model: PreTrainedModel, dtype: torch.dtype | None) -> Callable[[str, torch.Tensor], torch.dtype]:
    """A function that gives a weight's dtype after loading with `dtype`; some models keep a few weights in float32."""
    plan = model._get_dtype_plan(dtype) if dtype is not None else {}
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in plan) or "(?!)")
    model_dtype = model.dtype

    def dtype_of(name: str, tensor: torch.Tensor) -> torch.dtype:
        return tensor.dtype if dtype is None or tensor.dtype != model_dtype or kept.search(name) else dtype

    return dtype_of


def _exchange(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give `tensor` other data while it stays the same object, as `Module.to` does it."""
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    twin = torch.nn.Parameter(data, tensor.requires_grad) if is_parameter else data.detach()
    vars(twin).update(vars(tensor))
    torch.utils.swap_tensors(tensor, twin)


def _fingerprints(tensors: Iterable[torch.Tensor]) -> list[tuple]:
    """Values that change with the weights; `weight.data += 1` does not change its version counter."""
    plain = [tensor.data for tensor in tensors]
    return [(data.shape, data.dtype, digest) for data, digest in zip(plain, tensor_digests(plain), strict=True)]


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Leave inference mode, so that tensors made inside can be used outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield
