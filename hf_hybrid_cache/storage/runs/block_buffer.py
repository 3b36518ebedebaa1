"""The keys, or the values, of one layer in host memory, in the blocks that the kernels read."""

from collections.abc import Iterator

import numpy as np
import torch

from ..kv_shape import kernel_element
from ..memory.buffer_memory import HostMemory, Piece
from ..memory.growth import GRANULE
from .token_buffer import TokenBuffer

_LANES = 16


def kernel_array(states: torch.Tensor) -> np.ndarray:
    """
    Return states as the quantization kernels take them: float32, or uint16 for bfloat16 bits, with contiguous rows.

    They are not copied if they are float32 or bfloat16 and their rows are contiguous.
    """
    if states.dtype not in (torch.float32, torch.bfloat16):
        states = states.float()
    if states.stride(-1) != 1:
        states = states.contiguous()
    array: np.ndarray = (states.view(torch.uint16) if states.dtype == torch.bfloat16 else states).numpy()
    return array


class BlockBuffer(TokenBuffer):
    """
    States of one layer in blocks of 64 tokens, `[blocks, batch, heads, head_dim, 64]` or `[..., 64, head_dim]`.

    Any run of blocks is one piece of memory, for kernels and for copies to a device. Rows of values are padded with
    zeros to a multiple of 16. Kernels see batch and heads as one, bfloat16 as uint16 and half precision as int16.

    Args:
        transposed: tokens along the last axis, as kernels read keys.
    """

    row_entries = GRANULE
    is_lent = False  # states are copied out of blocks

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, memory: HostMemory, transposed: bool):
        self.transposed = transposed
        # Elements of a stored row, with the padding of values.
        self.stored_dim = shape[2] if transposed else -(-shape[2] // _LANES) * _LANES
        super().__init__(shape, dtype, memory, token_major=True)

    def stored_shape(self, num_entries: int) -> torch.Size:
        batch, heads, _ = self.shape
        block = (self.stored_dim, GRANULE) if self.transposed else (GRANULE, self.stored_dim)
        return torch.Size((self.rows(num_entries), batch, heads, *block))

    def write(self, start: int, states: torch.Tensor) -> None:
        tokens, (block, offset) = states.shape[2], divmod(start, GRANULE)
        if 0 < tokens <= GRANULE - offset:  # a step: few operations
            self.held.seen.select(2, block).narrow(2, offset, tokens).copy_(states)
        else:
            for first, place in self._runs(start, start + tokens):
                place.copy_(_like(place, states, first - start))

    def read_range(self, start: int, end: int) -> torch.Tensor:
        """Return a copy of tokens `start` to `end`, `[batch, heads, end - start, head_dim]`."""
        batch, heads, head_dim = self.shape
        with torch.inference_mode(False):
            states = torch.empty(batch, heads, end - start, head_dim, dtype=self.dtype)
        for first, place in self._runs(start, end):
            _like(place, states, first - start).copy_(place)
        return states

    def clear_rest(self, num_entries: int) -> None:
        block, offset = divmod(num_entries, GRANULE)
        if offset:
            self.held.seen[:, :, block, offset:] = 0

    def load(self, target: TokenBuffer, start: int, end: int) -> None:
        """Copy tokens `start` to `end` to the start of a buffer on a device, and take the blocks apart there."""
        for first, last, copies in self._pieces(start, end):
            # One kernel takes apart what several copies bring: a launch takes as long as a copy of a MiB.
            piece = torch.empty_like(self.held.stored[first:last], device=target.device)
            for begin, stop in copies:
                piece[begin - first : stop - first].copy_(self.held.stored[begin:stop], non_blocking=True)
            rows = self._as_seen(piece).flatten(2, 3)
            target.write(first * GRANULE - start, rows.narrow(2, 0, min(end - first * GRANULE, rows.shape[2])))

    def save(self, source: TokenBuffer, start: int, end: int, first_there: int = 0) -> None:
        """Put the blocks with tokens `start` to `end` together on the device of a buffer, and copy them from there."""
        for first, last, copies in self._pieces(start, end):
            make = torch.empty_like if self.stored_dim == self.shape[2] else torch.zeros_like
            piece = make(self.held.stored[first:last], device=source.device)
            rows = source.read_range(first * GRANULE - first_there, last * GRANULE - first_there)
            self._as_seen(piece).copy_(rows.unflatten(2, (last - first, GRANULE)))
            for begin, stop in copies:
                self.held.stored[begin:stop].copy_(piece[begin - first : stop - first], non_blocking=True)

    def _runs(self, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each run in `start` to `end`: its first token and a view `[batch, heads, blocks, tokens, head_dim]`."""
        while start < end:
            block, offset = divmod(start, GRANULE)
            blocks = (end - start) // GRANULE if offset == 0 and end - start >= GRANULE else 1
            tokens = min(GRANULE - offset, end - start)
            yield start, self.held.seen[:, :, block : block + blocks, offset : offset + tokens]
            start += blocks * tokens

    def _view(self, piece: Piece) -> None:
        if piece.space is None and self.stored_dim != self.shape[2]:
            piece.data.zero_()
        piece.stored = piece.data.view(self.dtype).view(self.stored_shape(piece.capacity))
        piece.seen = self._as_seen(piece.stored)
        element = kernel_element(self.dtype)
        if element is not None:
            piece.array = piece.stored.view(torch.uint8).flatten(1, 2).numpy().view(element)

    def _as_seen(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a view `[batch, heads, blocks, 64, head_dim]`, whether blocks are stored transposed or not."""
        seen = stored.permute(1, 2, 0, 4, 3) if self.transposed else stored.permute(1, 2, 0, 3, 4)
        return seen[..., : self.shape[2]]


def _like(place: torch.Tensor, states: torch.Tensor, start: int) -> torch.Tensor:
    """Return the part of `states` from token `start` on that fills `place`, in the shape of `place`."""
    blocks, tokens = place.shape[2:4]
    return states.narrow(2, start, blocks * tokens).unflatten(2, (blocks, tokens))
