"""Moving a model and its cache to the CPU between prefill and decoding, and back at the end."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..cache import HybridCache
from ..cache_argument import passed_cache
from .movable_weights import HOST, MovableWeights


class PhaseSwitch:
    """
    Moves a model and its cache to the CPU after the prefill, and back at the end.

    `generate` sees a model on the CPU from the beginning. Forward passes that fill the cache with the prompt run on the
    device, also in chunks, for beams and with drafted tokens; their outputs are moved to the CPU.

    Args:
        model: the model that generates.
        cache: of the model.
        weights: of the model, in use on the device.
        dtype: of the cache on the CPU; `None` for no change.
        restore: bring model and cache back.
        prompt_length: number of cached tokens with which decoding begins.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: HybridCache,
        weights: MovableWeights,
        dtype: torch.dtype | None,
        restore: bool,
        prompt_length: int,
    ):
        self._model = model
        self._cache = cache
        self._weights = weights
        self._dtype = dtype
        self._device_dtype = None if dtype is None else model.dtype
        self._restore = restore
        self._prompt_length = prompt_length
        self._is_decoding = False
        self._is_over = False
        self._hooks: list[RemovableHandle] = []

    def run(self, decode: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """
        Call `decode(model, **inputs)`; its result is in host memory.

        Model and cache always end up together on the device, also after an exception. They end up on the CPU if the
        prefill was done and they are not to come back, or if the device has no room any more (then with a warning).
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
        """Bring model and cache to their final device, wherever they are now."""
        self._remove_hooks()
        if not self._is_decoding:
            try:
                self._cache.to(self._weights.device, self._device_dtype)
            finally:
                self._weights.use_device()
        elif self._restore:
            self._return()
        else:
            self._weights.use_host()
            self._weights.free_device()
        self._is_over = True

    def _return(self) -> None:
        device = self._weights.device
        try:
            self._weights.load_to_device()
            self._cache.to(device, self._device_dtype)
        except BaseException as error:
            self._cache.to(HOST, self._dtype)
            self._weights.free_device()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            warnings.warn(
                f"Model and cache stay on the CPU, {device} has no room for them any more. Free some of it, then use "
                f"model.to('{device}') and cache.to('{device}'). It said: {error}",
                stacklevel=7,
            )
        else:
            self._weights.use_device()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


def on_device(tree: Any, device: torch.device) -> Any:
    """A copy of nested dicts, lists, tuples and model outputs with tensors on `device`; caches are not moved."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, ModelOutput):
        twin = copy.copy(tree)
        for name, value in tree.items():
            twin[name] = on_device(value, device)
        return twin
    if isinstance(tree, dict):
        return {name: on_device(value, device) for name, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(on_device(value, device) for value in tree)
    if isinstance(tree, list):
        return [on_device(value, device) for value in tree]
    return tree
