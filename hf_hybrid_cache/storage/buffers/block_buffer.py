"""The keys, or the values, of one layer in host memory, in the blocks that the kernels read."""

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import torch

from ..memory.growth import GRANULE
from .run_buffer import RunBuffer
from .token_buffer import TokenBuffer

BLOCK = GRANULE
_LANES = 16
_PIECE_BYTES = 32 * 2**20
# Numba has no name for bfloat16 and half precision: kernels read them as unsigned and as signed 16-bit integers.
_ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}


def kernel_element(dtype: torch.dtype) -> np.dtype | None:
    """Return the NumPy type by which kernels read blocks of `dtype`; `None` if there is no kernel for it."""
    return np.dtype(_ELEMENTS[dtype]) if dtype in _ELEMENTS else None


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


class _Places(NamedTuple):
    """Views of the tokens of a block, `[batch, heads, 1, head_dim]`."""

    block: int
    of_tokens: tuple[torch.Tensor, ...]


class BlockBuffer(RunBuffer):
    """
    States of one layer in blocks of 64 tokens, `[blocks, batch, heads, head_dim, 64]` or `[..., 64, head_dim]`.

    Any run of blocks is one piece of memory, for kernels and for copies to a device. Rows of values are padded with
    zeros to a multiple of 16.

    Args:
        shape: `(batch, num_kv_heads, head_dim)`.
        dtype: type of the stored states.
        transposed: tokens along the last axis, as kernels read keys.
        expected_tokens: reserve address space for this many.
        pinned_for: see `RunBuffer`.
    """

    row_entries = BLOCK
    _places: _Places | None = None

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        transposed: bool,
        expected_tokens: int = 0,
        pinned_for: torch.device | None = None,
    ):
        self.transposed = transposed
        super().__init__(shape, dtype, False, expected_tokens, pinned_for=pinned_for)

    @property
    def stored_dim(self) -> int:
        """Number of elements in a stored row, with the padding of values."""
        head_dim = self.shape[2]
        return head_dim if self.transposed else -(-head_dim // _LANES) * _LANES

    @property
    def bytes_per_token(self) -> int:
        batch, heads, _ = self.shape
        return batch * heads * self.stored_dim * self.dtype.itemsize

    def array(self) -> np.ndarray:
        """
        Return a view of the blocks for a kernel, `[blocks, batch * heads, head_dim, 64]` or `[..., 64, head_dim]`.

        bfloat16 is seen as uint16, half precision as int16.
        """
        return self._array

    def write(self, start: int, states: torch.Tensor) -> None:
        if states.shape[2] == 1:  # a decode step: one operation
            self._place_of(start).copy_(states)
            return
        tokens, (block, offset) = states.shape[2], divmod(start, BLOCK)
        if 0 < tokens <= BLOCK - offset:  # a step of several tokens: few operations
            self._seen.select(2, block).narrow(2, offset, tokens).copy_(states)
            return
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
        block, offset = divmod(num_entries, BLOCK)
        if offset:
            self._seen[:, :, block, offset:] = 0

    def load(self, target: TokenBuffer, start: int, end: int) -> None:
        """
        Copy tokens `start` to `end` to the start of a buffer on a device, and take the blocks apart there.

        Args:
            target: the buffer.
            start: first token of a block.
            end: any token.
        """
        for first, last in self._pieces(start // BLOCK, self.rows(end)):
            # One kernel takes apart what several copies bring: a launch takes as long as a copy of a MiB.
            piece = torch.empty_like(self._data[first:last], device=target.device)
            for begin, stop in self._copies(first, last):
                piece[begin - first : stop - first].copy_(self._data[begin:stop], non_blocking=True)
            rows = self._as_seen(piece).flatten(2, 3)
            count = min(end - first * BLOCK, rows.shape[2])
            target.write(first * BLOCK - start, rows.narrow(2, 0, count))

    def save(self, source: TokenBuffer, start: int, end: int, first_there: int = 0) -> None:
        """
        Put the blocks with tokens `start` to `end` together on the device of a buffer, and copy them from there.

        Args:
            source: the buffer.
            start: any token.
            end: any token.
            first_there: first token in the buffer, which is the first of a block.
        """
        for first, last in self._pieces(start // BLOCK, self.rows(end)):
            make = torch.empty_like if self.stored_dim == self.shape[2] else torch.zeros_like
            piece = make(self._data[first:last], device=source.device)
            rows = source.read_range(first * BLOCK - first_there, last * BLOCK - first_there)
            self._as_seen(piece).copy_(rows.unflatten(2, (last - first, BLOCK)))
            for begin, stop in self._copies(first, last):
                self._data[begin:stop].copy_(piece[begin - first : stop - first], non_blocking=True)

    def select(self, indices: torch.Tensor, num_tokens: int) -> Self:
        batch, heads, head_dim = self.shape
        target = self
        if len(indices) != batch:
            target = self._emptied((len(indices), heads, head_dim))
            target.ensure(num_tokens, keep=0)
        for first, last in self._pieces(0, self.rows(num_tokens)):
            target._data[first:last] = self._data[first:last].index_select(1, indices)
        return target

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Split blocks `first` to `last` into pieces that are put together or taken apart at once."""
        most = max(1, _PIECE_BYTES // max(1, BLOCK * self.bytes_per_token))
        return ((start, min(start + most, last)) for start in range(first, last, most))

    def _place_of(self, token: int) -> torch.Tensor:
        """Return a view of one token, `[batch, heads, 1, head_dim]`, made with those of its block."""
        block, offset = divmod(token, BLOCK)
        if self._places is None or self._places.block != block:
            with torch.inference_mode(False):
                self._places = _Places(block, self._seen.select(2, block).split(1, dim=2))
        return self._places.of_tokens[offset]

    def _runs(self, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each run in `start` to `end`: its first token and a view `[batch, heads, blocks, tokens, head_dim]`."""
        while start < end:
            block, offset = divmod(start, BLOCK)
            blocks = (end - start) // BLOCK if offset == 0 and end - start >= BLOCK else 1
            tokens = min(BLOCK - offset, end - start)
            yield start, self._seen[:, :, block : block + blocks, offset : offset + tokens]
            start += blocks * tokens

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        data = super()._allocate(num_tokens)
        if self.stored_dim != self.shape[2]:
            data.zero_()
        return data

    def _stored_shape(self, num_tokens: int) -> torch.Size:
        batch, heads, _ = self.shape
        rows = (self.stored_dim, BLOCK) if self.transposed else (BLOCK, self.stored_dim)
        return torch.Size((self.rows(num_tokens), batch, heads, *rows))

    def _adopt(self, data: torch.Tensor) -> None:
        super()._adopt(data)
        self._places = None
        element = kernel_element(self.dtype)
        if element is not None:
            bits = data.view(torch.uint8).flatten(1, 2).numpy()
            self._array = bits.view(element)

    def _as_seen(self, data: torch.Tensor) -> torch.Tensor:
        """Return a view `[batch, heads, blocks, 64, head_dim]`, whether blocks are stored transposed or not."""
        seen = data.permute(1, 2, 0, 4, 3) if self.transposed else data.permute(1, 2, 0, 3, 4)
        return seen[..., : self.shape[2]]


def _like(place: torch.Tensor, states: torch.Tensor, start: int) -> torch.Tensor:
    """Return the part of `states` from token `start` on that fills `place`, in the shape of `place`."""
    blocks, tokens = place.shape[2:4]
    return states.narrow(2, start, blocks * tokens).unflatten(2, (blocks, tokens))
