"""A model and its cache, on their device for the prompt and on the CPU for the tokens after it."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .cache import HybridCache
from .weights import HOST, TravellingWeights


class Journey:
    """
    Takes a model and its cache to the CPU when the prompt is in the cache, and brings them back in the end.

    For `generate` the model is on the CPU from the beginning. Forward passes that fill the cache with the prompt are
    computed at home, whoever asks for them: in chunks, for beams, with drafted tokens. Their outputs are on the CPU.

    Args:
        model: whose weights travel.
        cache: of the model.
        weights: the model's, in use at home.
        dtype: of the cache on the CPU; `None` for no change.
        restore: bring both back.
        prompt_length: tokens in the cache with which decoding begins.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: HybridCache,
        weights: TravellingWeights,
        dtype: torch.dtype | None,
        restore: bool,
        prompt_length: int,
    ):
        self._model = model
        self._cache = cache
        self._weights = weights
        self._dtype = dtype
        self._home_dtype = None if dtype is None else model.dtype
        self._restore = restore
        self._prompt_length = prompt_length
        self._arrived = False
        self._is_over = False
        self._hooks: list[RemovableHandle] = []

    def run(self, decode: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """
        What `decode(model, **inputs)` returns, all of it in host memory.

        Whatever happens, model and cache end up together: at home, or on the CPU if the prompt was finished and they
        are not to come back, or cannot because the device has no room any more (then with a warning).
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
            # Another Ctrl-C, which ended the way back.
            if not self._is_over:
                self._end()
            raise

    def _before_forward(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if kwargs.get("past_key_values") is not self._cache:
            return None
        self._weights.use_home()
        return on_device(args, self._weights.home), on_device(kwargs, self._weights.home)

    def _after_forward(self, model: Any, args: tuple, kwargs: dict[str, Any], output: ModelOutput) -> None:
        if kwargs.get("past_key_values") is not self._cache:
            return
        # In place: whoever holds the output must not hold memory of the device.
        for name, value in output.items():
            output[name] = on_device(value, HOST)
        if self._cache.get_seq_length() >= self._prompt_length:
            self._cache.to(HOST, self._dtype)
            self._arrived = True
            self._remove_hooks()
        self._weights.use_host()
        if self._arrived:
            self._weights.leave_home()

    def _end(self) -> None:
        """Bring model and cache to where they are to stay; they may be anywhere on their ways, or there."""
        self._remove_hooks()
        if not self._arrived:
            try:
                self._cache.to(self._weights.home, self._home_dtype)
            finally:
                self._weights.use_home()
        elif self._restore:
            self._return()
        else:
            self._weights.use_host()
            self._weights.leave_home()
        self._is_over = True

    def _return(self) -> None:
        home = self._weights.home
        try:
            self._weights.load_home()
            self._cache.to(home, self._home_dtype)
        except BaseException as error:
            self._cache.to(HOST, self._dtype)
            self._weights.leave_home()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            warnings.warn(
                f"Model and cache stay on the CPU, {home} has no room for them any more. Free some of it, then use "
                f"model.to('{home}') and cache.to('{home}'). It said: {error}",
                stacklevel=7,
            )
        else:
            self._weights.use_home()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


def on_device(tree: Any, device: torch.device) -> Any:
    """The same dicts, lists, tuples and model outputs with tensors on `device`; caches and the like stay."""
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
