"""Masks of attention, as kernels take them, made once for all layers of a step."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

Arrays = tuple[np.ndarray | None, np.ndarray | None]
Made = TypeVar("Made")


class LastMask(Generic[Made]):
    """
    Keeps the object made for the last mask, because the layers of a model get the same mask in turn.

    Args:
        make: makes the object.
    """

    def __init__(self, make: Callable[[torch.Tensor | None], Made]):
        self._make = make
        # Mask, identity and object in one attribute: other threads never see a mixture.
        self._last: tuple[torch.Tensor | None, object, Made] = (None, None, make(None))

    def of(self, mask: torch.Tensor | None) -> Made:
        """Return the result of `make(mask)`, made once for each mask."""
        if mask is None:
            return self._make(None)
        # Every layer gets a view of its own; the mask is held, so that its memory is not another's meanwhile.
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.device)
        version = None if mask.is_inference() else mask._version
        last_mask, last_key, made = self._last
        if last_mask is None or (key, version) != last_key or version is None:
            made = self._make(mask)
            self._last = mask, (key, version), made
        return made


def mask_arrays(mask: torch.Tensor | None) -> Arrays:
    """`mask` as the kernel takes it, (visible, bias), of which at least one is `None`."""
    if mask is None:
        return None, None
    host = mask.detach().to("cpu")
    if host.dtype == torch.bool:
        return host.contiguous().view(torch.uint8).numpy(), None
    return None, host.to(torch.float32).contiguous().numpy()


class SeenTokens(NamedTuple):
    """
    A mask as the kernel for many queries takes it.

    Attributes:
        ranges: int64 `[batch, query_heads, query_length, 2]`, where any of the first three may be 1: the first token
            that a query sees, and the one after the last; `None` for all.
        visible: uint8 `[batch, query_heads, query_length, tokens]` likewise, if some token between these is hidden.
        bias: float32 likewise, if the mask is added to the scores.
    """

    ranges: np.ndarray | None = None
    visible: np.ndarray | None = None
    bias: np.ndarray | None = None


def seen_tokens(mask: torch.Tensor | None) -> SeenTokens:
    """`mask` as the kernel for many queries takes it."""
    visible, bias = mask_arrays(mask)
    if visible is None:
        return SeenTokens(bias=bias)
    tokens = visible.shape[-1]
    first, last = visible.argmax(-1), tokens - visible[..., ::-1].argmax(-1)
    count = visible.sum(-1, dtype=np.int64)
    ranges = np.stack([first, np.where(count == 0, first, last)], axis=-1)
    return SeenTokens(ranges, None if np.array_equal(count, ranges[..., 1] - first) else visible)


def causal_tokens(query_length: int, tokens: int) -> SeenTokens:
    """Return the tokens that causal queries see, if the queries are the last of `tokens` tokens."""
    ends = np.arange(tokens - query_length + 1, tokens + 1)
    return SeenTokens(np.stack([np.zeros_like(ends), ends], axis=-1)[None, None])
