"""The queries of an attention call, and their masks in the forms that kernels and torch take."""

import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from ..storage import StorageUses

Made = TypeVar("Made")
# Which tokens are seen, and what is added to the scores; at least one is `None`.
MaskArrays = tuple[np.ndarray | None, np.ndarray | None]
# Of a forward pass: that of the prefix, and that of what follows it.
_MOST_MASKS = 2


class Queries(NamedTuple):
    """
    The queries of one attention call.

    Attributes:
        states: `[batch, query_heads, query_length, head_dim]`, on any device.
        group: query heads that share a KV head.
        scale: of the scores; `None` for `head_dim ** -0.5`.
        mask: boolean (true where a token is seen) or added to the scores; `[batch, query_heads, query_length, tokens]`
            of the tokens that they attend to, where any of the first three may be 1.
        are_causal: they are the last tokens of the sequence, and each sees the tokens before it and itself.
        cap: of a soft cap, `cap * tanh(score / cap)`, before the mask; `None` for none.
        sinks: one more score of each query, that of a token whose value is zero, `[batch, query_heads, query_length,
            1]`, where any of the first three may be 1; `None` for none.
    """

    states: torch.Tensor
    group: int
    scale: float | None
    mask: torch.Tensor | None = None
    are_causal: bool = False
    cap: float | None = None
    sinks: torch.Tensor | None = None

    def rows(self) -> torch.Tensor:
        """Return the queries of a KV head as rows, `[batch, num_kv_heads, group * query_length, head_dim]`."""
        batch, heads, length, head_dim = self.states.shape
        return self.states.reshape(batch, heads // self.group, self.group * length, head_dim)

    def of_tokens(self, *ranges: tuple[int, int]) -> "Queries":
        """Return the queries with the mask of tokens in some ranges."""
        if self.mask is None:
            return self
        columns = [self.mask[..., start:end] for start, end in ranges]
        return self._replace(mask=columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1))


class MadeOfMasks(Generic[Made]):
    """
    Keeps what `make` makes of masks while these are there, because the layers of a model get the same ones in turn.

    What would keep its mask is not kept: nothing was copied, and the memory of a mask may be large.
    """

    def __init__(self, make: Callable[..., Made]):
        self._make = make
        self._made: dict[object, tuple[weakref.ref[torch.UntypedStorage], Made]] = {}

    def of(self, mask: torch.Tensor, *others: object) -> Made:
        """Return `make(mask, *others)`, made once for each mask and hashable `others`."""
        if mask.is_inference():  # nobody counts what is written to it
            return self._make(mask, *others)
        # Every layer gets a view of its own.
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.device, mask._version, others)
        if key in self._made:
            return self._made[key][1]
        uses = StorageUses(mask)
        made = self._make(mask, *others)
        if not uses.is_shared:
            if len(self._made) >= _MOST_MASKS:
                self._made = {}
            self._made[key] = weakref.ref(mask.untyped_storage(), self._forget), made
        return made

    def _forget(self, mask: object) -> None:
        self._made = {key: made for key, made in self._made.items() if made[0] is not mask}


def covers(mask: torch.Tensor, query: torch.Tensor, tokens: int) -> bool:
    """Return whether attention takes `mask`: one value a token, shared by sequences, heads and queries or not."""
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    full = (*query.shape[:3], tokens)
    return (
        len(shape) == 4
        and shape[3] == tokens
        and all(size in (1, expected) for size, expected in zip(shape, full, strict=True))
        and (mask.dtype == torch.bool or mask.dtype.is_floating_point)
    )


def simplified(mask: torch.Tensor) -> torch.Tensor | None:
    """
    Return a mask that is added to scores as one that says which tokens are seen, if it says no more than that.

    `None` is for a mask that hides nothing. A query that sees no token keeps its numbers: it attends to all alike.
    """
    is_hidden = mask <= torch.finfo(mask.dtype).min
    if not bool(((mask == 0) | is_hidden).all()):
        return mask
    if not bool(is_hidden.any()):
        return None
    return mask if bool(is_hidden.all(dim=-1).any()) else ~is_hidden


def is_array(mask: torch.Tensor) -> bool:
    """Return whether `mask_arrays` copies nothing."""
    return mask.is_cpu and mask.dtype in (torch.bool, torch.float32) and mask.stride(-1) == 1


def in_host_memory(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask of which `mask_arrays` copies nothing."""
    if is_array(mask):
        return mask
    return mask.detach().to("cpu", torch.bool if mask.dtype == torch.bool else torch.float32).contiguous()


def mask_arrays(mask: torch.Tensor) -> MaskArrays:
    """Return a mask as the kernels take it."""
    mask = in_host_memory(mask).detach()
    return (mask.view(torch.uint8).numpy(), None) if mask.dtype == torch.bool else (None, mask.numpy())


class SeenTokens(NamedTuple):
    """
    A mask as the kernel for many queries takes it.

    Attributes:
        ranges: int64 `[batch, query_heads, query_length, 2]`, where any of the first three may be 1: the first token
            that a query sees, and the one after the last.
        visible: uint8 `[batch, query_heads, query_length, tokens]` likewise, if some token between these is hidden.
        bias: float32 likewise, if the mask is added to the scores.
    """

    ranges: np.ndarray
    visible: np.ndarray | None = None
    bias: np.ndarray | None = None


def seen_ranges(mask: torch.Tensor) -> tuple[np.ndarray, bool]:
    """Return the ranges of a mask, see `SeenTokens`, and whether they are not all that it says."""
    visible, _ = mask_arrays(mask)
    tokens = mask.shape[-1]
    if visible is None:
        return np.array([[[[0, tokens]]]]), True
    first, last = visible.argmax(-1), tokens - visible[..., ::-1].argmax(-1)
    count = visible.sum(-1, dtype=np.int64)
    ranges = np.stack([first, np.where(count == 0, first, last)], axis=-1)
    return ranges, not np.array_equal(count, ranges[..., 1] - first)


def causal_tokens(query_length: int, tokens: int) -> SeenTokens:
    """Return the tokens that causal queries see, if the queries are the last of `tokens` tokens."""
    ends = np.arange(tokens - query_length + 1, tokens + 1)
    return SeenTokens(np.stack([np.zeros_like(ends), ends], axis=-1)[None, None])


def folded(states: torch.Tensor, continuations: int) -> torch.Tensor:
    """Return `[groups * continuations, heads, length, ...]` as `[groups, heads, continuations * length, ...]`."""
    return states.unflatten(0, (-1, continuations)).transpose(1, 2).flatten(2, 3)


def unfolded(rows: torch.Tensor, continuations: int) -> torch.Tensor:
    """Undo `folded`."""
    return rows.unflatten(2, (continuations, -1)).transpose(1, 2).flatten(0, 1)


def folded_mask(mask: torch.Tensor, continuations: int, length: int) -> torch.Tensor | None:
    """Return the mask of folded queries, `length` of each sequence; `None` if it hides nothing."""
    if mask.dtype == torch.bool and bool(mask.all()):
        return None
    if mask.shape[0] == 1:
        return mask if mask.shape[2] == 1 else mask.repeat(1, 1, continuations, 1)
    return folded(mask.expand(-1, -1, length, -1), continuations)
