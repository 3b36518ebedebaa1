"""A model and its cache: on their device for the prompt, in host memory to decode, and back at the end."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..cache import HybridCache
from ..cache_argument import passed_cache
from ..model_identity import digest_of_tensors
from ..storage import require_host_bytes
from ..weights import QUANTIZED_DTYPES, Covered, QuantizedWeight, Width, coverage, quantization_bar, require_some

HOST = torch.device("cpu")


class PhaseSwitch:
    """
    Moves a model and its cache to the CPU after the prefill, and back at the end.

    `generate` sees a model on the CPU from the beginning. Forward passes that fill the cache with the prompt run on the
    device, also in chunks, for beams and with drafted tokens; their outputs are moved to the CPU. Decoding begins with
    `prompt_length` cached tokens, which get `dtype` if that is given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: HybridCache,
        weights: "MovableWeights",
        dtype: torch.dtype | None,
        prompt_length: int,
    ):
        self._model, self._cache, self._weights = model, cache, weights
        self._dtype, self._device_dtype = dtype, None if dtype is None else model.dtype
        self._prompt_length = prompt_length
        self._is_decoding = self._is_over = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def run(self, decode: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """
        Call `decode(model, **inputs)`; its result is in host memory.

        Model and cache always end up together on the device, also after an exception; or on the CPU, if the device has
        no room any more (then with a warning).
        """
        try:
            try:
                add_pre_hook, add_hook = self._model.register_forward_pre_hook, self._model.register_forward_hook
                self._hooks.append(add_pre_hook(self._before_forward, prepend=True, with_kwargs=True))
                self._hooks.append(add_hook(self._after_forward, with_kwargs=True))
                self._weights.use_host()
                return decode(self._model, **inputs)
            finally:
                self._end()
        except BaseException:
            # A second Ctrl-C may have interrupted the move back.
            if not self._is_over:
                self._end()
            raise

    def _before_forward(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if passed_cache(kwargs) is not self._cache:
            return None
        self._weights.use_device()
        return on_device(args, self._weights.device), on_device(kwargs, self._weights.device)

    def _after_forward(self, model: Any, args: tuple, kwargs: dict[str, Any], output: ModelOutput) -> None:
        if passed_cache(kwargs) is not self._cache:
            return
        # In place, so that no holder of the output keeps memory of the device.
        for name, value in output.items():
            output[name] = on_device(value, HOST)
        if self._cache.get_seq_length() >= self._prompt_length:
            self._cache.to(HOST, self._dtype)
            self._is_decoding = True
            self._remove_hooks()
        self._weights.use_host()
        if self._is_decoding:
            self._weights.free_device()

    def _end(self) -> None:
        """Bring model and cache back, wherever they are now; leave both on the CPU if that is not possible."""
        self._remove_hooks()
        device = self._weights.device
        try:
            self._weights.load_to_device()
            self._cache.to(device, self._device_dtype)
        except BaseException as error:
            self._cache.to(HOST, self._dtype)
            self._weights.use_host()
            self._weights.free_device()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            warnings.warn(
                f"Model and cache stay on the CPU, {device} has no room for them any more. Free some of it, then use "
                f"model.to('{device}') and cache.to('{device}'). It said: {error}",
                stacklevel=6,
            )
        else:
            self._weights.use_device()
        self._is_over = True

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


def on_device(tree: Any, device: torch.device) -> Any:
    """A copy of nested dicts, lists, tuples and model outputs with tensors on `device`; caches are not moved."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)


class HostCopies(NamedTuple):
    """
    A model's weights in host memory, in the order of `weights_of`.

    Attributes:
        data: the numbers that decoding reads.
        originals: what the weights are made from again; the same tensors, unless converting has lost something.
        codes: what decoding reads instead of some parameters, by their names.
    """

    data: list[torch.Tensor]
    originals: list[torch.Tensor]
    codes: dict[str, QuantizedWeight]


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The parameters, and the buffers that are in a checkpoint, by name; tied ones once."""
    in_checkpoint = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) in in_checkpoint}
    return dict(model.named_parameters()) | buffers


def digest_of_weights(model: PreTrainedModel) -> str:
    """A digest that changes with the weights; `weight.data += 1` does not change a version counter."""
    with _plain_tensors():
        return digest_of_tensors({name: tensor.data for name, tensor in weights_of(model).items()})


def copy_to_host(model: PreTrainedModel, dtype: torch.dtype | None, width: Width | None) -> HostCopies:
    """
    Copy a model's weights to host memory; the model does not change.

    Args:
        model: with all weights on one device.
        dtype: of the copies of weights that have the model's dtype; `None` for no change.
        width: of the weights that can be quantized; `None` for all weights as they are.

    Raises:
        HostMemoryError: host memory would not suffice.
        ValueError: no weight can be quantized, or one that can be has numbers that are not finite.
    """
    weights, dtype_of = weights_of(model), _target_dtypes(model, dtype)
    covered: dict[str, Covered] = {}
    if width is not None:
        found, left = coverage(model)
        covered = {each.name: each for each in found if dtype_of(each.name, each.parameter) in QUANTIZED_DTYPES}
        require_some(list(covered.values()), left, model)
    is_in_host = model.device.type == "cpu"
    num_bytes, plans = 0, []
    for name, tensor in weights.items():
        # Decoding does not read the numbers of which it reads codes.
        target = tensor.dtype if name in covered else dtype_of(name, tensor)
        loses = torch.promote_types(tensor.dtype, target) != target
        plans.append((name, tensor, target, loses))
        num_bytes += 0 if is_in_host and target == tensor.dtype else tensor.numel() * target.itemsize
        num_bytes += tensor.nbytes if loses and not is_in_host else 0
        if width is not None and name in covered:
            num_bytes += covered[name].quantized_bytes(width)
    require_host_bytes(num_bytes, "Weights to decode with on the CPU need")
    copies = HostCopies([], [], {})
    with _plain_tensors(), quantization_bar(len(plans), None if width is None else width.bits) as bar:
        for name, tensor, target, loses in plans:
            # Converted in the host: the device may have no room for both.
            original = tensor.data.to(HOST)
            copies.data.append(original.to(target))
            copies.originals.append(original if loses or is_in_host else copies.data[-1])
            if width is not None and name in covered:
                each, of_codes = covered[name], dtype_of(name, tensor)
                try:
                    copies.codes[name] = each.quantized(each.as_stack(original.to(of_codes)), of_codes, width)
                except ValueError as error:
                    raise ValueError(f"{name} {error}. Use weights=None.") from None
            bar.update()
    return copies


class MovableWeights:
    """
    A model's weights on its device and in host memory; the model computes with either.

    Parameters and buffers stay the same objects, so ties, optimizers and references to them remain valid. Only their
    data is exchanged; codes take the place of parameters in the modules. Buffers that are not in a checkpoint, such as
    rotary frequencies, keep their dtype.
    """

    def __init__(self, model: PreTrainedModel, copies: HostCopies):
        self.device = model.device
        self._model, self._copies = model, copies
        self._tensors = list(weights_of(model).values())
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        self._on_device: list[torch.Tensor] | None = [tensor.data for tensor in self._tensors]
        # Equal copies of an earlier call are not the memory that the model had.
        self._originals = self._on_device if self.device.type == "cpu" else copies.originals
        covered = {each.name: each for each in coverage(model)[0]} if copies.codes else {}
        self._codes = [(covered[name], codes) for name, codes in copies.codes.items()]

    def use_device(self) -> None:
        """Make the model compute with the weights on its own device, which must be loaded there."""
        assert self._on_device is not None
        self._exchange(self._on_device, self.device)
        for covered, _ in self._codes:
            covered.hold(covered.parameter)

    def use_host(self) -> None:
        """Make the model compute with the weights in host memory."""
        for covered, codes in self._codes:
            covered.hold(codes)
        self._exchange(self._copies.data, HOST)

    def free_device(self) -> None:
        """Free the device's memory; the host's copies must be in use."""
        self._on_device = None
        give_back = getattr(getattr(torch, self.device.type, None), "empty_cache", None)
        if give_back is not None:
            give_back()

    def load_to_device(self) -> None:
        """Copy the weights to the device again, bit by bit as they were, without using them yet."""
        if self._on_device is None:
            with _plain_tensors():
                # Converted in the host: the device may have room for the smaller dtype only.
                self._on_device = [
                    data.to(dtype).to(self.device) for data, dtype in zip(self._originals, self._dtypes, strict=True)
                ]

    def _exchange(self, data: list[torch.Tensor], device: torch.device) -> None:
        with _plain_tensors():
            for tensor, each in zip(self._tensors, data, strict=True):
                _exchange(tensor, each)
            # Found anew: rotary embeddings that scale with the length replace their buffers in a forward pass.
            weights = {id(tensor) for tensor in self._tensors}
            for buffer in self._model.buffers():
                if id(buffer) not in weights:
                    _exchange(buffer, buffer.data.to(device))


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


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Leave inference mode, so that tensors made inside can be used outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield
