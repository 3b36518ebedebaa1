"""Asymmetric min-max codes of 8, 4 or 2 bits: keys per channel over tokens, values per token over channels."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..kernels import BITS, CHUNK, PackedLayout, dequantize_blocks, quantize_blocks
from ..scalars import as_integer
from ..storage import GRANULE, Codec, KVCodec, kernel_array
from .channel_scaling import ChannelScaling, factors_for_keys, rotation_matrix_for_values
from .precision import as_written
from .torch_quantization import dequantize_by_torch, quantize_by_torch

Rotate = bool | Literal["auto"]

# Decoding on an accelerator takes at most so many bytes besides its result.
_PIECE_BYTES = 64 * 2**20
# Of rotated or plain numbers, per channel or per token: what loses least on SmolLM2-135M (docs/log.md). With four codes
# for a range, rare numbers beyond it cost less than coarse steps; with sixteen they cost more.
_TWO_BIT_SHARES = {(True, True): 0.8, (True, False): 0.85, (False, True): 0.7, (False, False): 1.0}

# What is usual in SmolLM2-135M, Qwen2.5-Coder-0.5B and Gemma-3-270M (docs/log.md): the root mean square of the error of
# a score, in nats, in the head of a layer where it is largest; and of the error of a value, of its length.
_USUAL_SCORE_ERROR = {8: 0.01, 4: 0.17, 2: 0.7}
_USUAL_VALUE_ERROR = {8: 0.0045, 4: 0.075, 2: 0.31}


@dataclass(frozen=True)
class MinMaxCodec(Codec):
    """
    Quantization to `bits` bits with a scale and a minimum, in bfloat16, for each group (KIVI, arXiv:2402.02750).

    Attributes:
        bits: 8, 4 or 2.
        group_size: elements that share a scale, a multiple of 16: along the tokens of a block for keys, so that 64 is
            the most there, along head_dim for values.
        per_channel: as for keys; `False` is as for values.
        is_rotated: rotate each key or value by a Hadamard transform before it is quantized.
        channel_scaling: factors, or a matrix, by which each head's keys or values are multiplied before rotation;
            `None` for none.
        is_fitted: whether `channel_scaling` is what it will be; otherwise it is chosen from the first states.
    """

    bits: int
    group_size: int
    per_channel: bool
    is_rotated: bool = True
    channel_scaling: ChannelScaling | None = None
    is_fitted: bool = True

    def __str__(self) -> str:
        channel_scaling = self.channel_scaling
        how = "" if channel_scaling is None else "mixed, " if channel_scaling.is_matrix else "channel-scaled, "
        how = f"{how}{'rotated' if self.is_rotated else 'plain'}" if self.is_fitted else "to be chosen"
        return f"{self.bits} bits ({how})"

    def layout(self, head_dim: int) -> PackedLayout:
        """The layout of a packed block for the kernels."""
        make = PackedLayout.of_keys if self.per_channel else PackedLayout.of_values
        return make(self.bits, head_dim, self.group_size, self.is_rotated)

    @property
    def _share(self) -> float:
        """The share of a group's range that codes cover."""
        return _TWO_BIT_SHARES[self.is_rotated, self.per_channel] if self.bits == 2 else 1.0

    def packed_bytes(self, head_dim: int) -> int:
        return self.layout(head_dim).num_bytes

    def fitted(self, states: torch.Tensor, query_squares: torch.Tensor | None) -> "MinMaxCodec":
        if self.is_fitted:
            return self
        weights = factors_for_keys(states, query_squares) if self.per_channel else rotation_matrix_for_values(states)
        return replace(self, channel_scaling=None if weights is None else ChannelScaling(weights), is_fitted=True)

    def wider(self) -> "MinMaxCodec | None":
        bits = next((bits for bits in reversed(BITS) if bits > self.bits), None)
        return None if bits is None else replace(self, bits=bits, channel_scaling=None, is_fitted=False)

    def excess(self, states: torch.Tensor, query_squares: torch.Tensor | None) -> float:
        decoded = torch.empty(states.shape, dtype=torch.float32, device=states.device)
        self.decode(self.encode(states), decoded)
        squares = (decoded - states.float()).double().square().mean(dim=(0, 2))
        if not self.per_channel:
            all_squares = states.double().square().mean(dim=(0, 2)).sum()
            return float((squares.sum() / all_squares).sqrt()) / _USUAL_VALUE_ERROR[self.bits] if all_squares else 0.0
        if query_squares is None:
            return 0.0
        scores = (squares * query_squares.to(squares)).sum(dim=1) / states.shape[3]
        return float(scores.max().sqrt()) / _USUAL_SCORE_ERROR[self.bits]

    def require_fit(self, num_kv_heads: int, head_dim: int) -> None:
        if self.channel_scaling is not None:
            self.channel_scaling.require_fit(num_kv_heads, head_dim)

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        with as_written(states.device):
            return self._encoded(states)

    def decode(self, packed: torch.Tensor, states: torch.Tensor) -> None:
        with as_written(states.device):
            self._decode(packed, states)

    def _encoded(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, head_dim = states.shape
        layout, factors, channel_scaling = self.layout(head_dim), None, self.channel_scaling
        on_cpu = states.device.type == "cpu"
        if channel_scaling is not None and on_cpu and not channel_scaling.is_matrix:
            factors = channel_scaling.array
        elif channel_scaling is not None:
            states = channel_scaling.applied(states.detach())
        if on_cpu:
            packed = torch.from_numpy(quantize_blocks(kernel_array(states.detach()), layout, self._share, factors))
            return packed.unflatten(1, (batch, heads)).permute(1, 2, 0, 3)
        return quantize_by_torch(states, layout, self._share)

    def _decode(self, packed: torch.Tensor, states: torch.Tensor) -> None:
        batch, heads, blocks, _ = packed.shape
        layout, channel_scaling = self.layout(states.shape[3]), self.channel_scaling
        if states.device.type == "cpu":
            rows = packed.permute(2, 0, 1, 3).flatten(1, 2).contiguous().numpy()
            is_mixed = channel_scaling is not None and channel_scaling.is_matrix
            factors = None if channel_scaling is None or is_mixed else channel_scaling.inverse_array
            if states.dtype in (torch.float32, torch.bfloat16) and not is_mixed:
                dequantize_blocks(rows, layout, kernel_array(states), factors)
                return
            numbers = torch.empty(states.shape)
            dequantize_blocks(rows, layout, numbers.numpy(), factors)
            states.copy_(channel_scaling.undone(numbers) if channel_scaling is not None and is_mixed else numbers)
            return
        block_bytes = 4 * batch * heads * layout.inner * layout.lanes
        step = max(1, _PIECE_BYTES // max(1, block_bytes))
        for start in range(0, blocks, step):
            piece = packed[:, :, start : start + step]
            numbers = dequantize_by_torch(piece, layout)
            numbers = numbers if channel_scaling is None else channel_scaling.undone(numbers)
            states[:, :, start * GRANULE : (start + step) * GRANULE] = numbers


def minmax_codecs(codec: KVCodec) -> tuple[MinMaxCodec, MinMaxCodec] | None:
    """Return the codecs of keys and values if both are of this form."""
    keys, values = codec.keys, codec.values
    return (keys, values) if isinstance(keys, MinMaxCodec) and isinstance(values, MinMaxCodec) else None


def minmax(
    bits: int | tuple[int, int] = 4,
    group_size: int = GRANULE,
    sink_tokens: int = GRANULE,
    rotate: Rotate = "auto",
    auto_bits: bool = False,
) -> KVCodec:
    """
    Min-max codes for keys and values.

    Args:
        bits: 8, 4 or 2, or a pair of these for keys and for values.
        group_size: see `MinMaxCodec`.
        sink_tokens: first tokens that stay in full precision, filled up to whole blocks of 64.
        rotate: rotate each key and value by a Hadamard transform before it is quantized, as llama.cpp does (its pull
            request 21038): outliers are spread over all channels. `"auto"` scales the channels of each layer before
            that, by the first keys, values and queries of a prompt.

        auto_bits: give the keys, or the values, of a layer more bits, up to 8, where their codes lose far more than is
            usual with so many; all layers together take at most half as much memory more. With `rotate="auto"`.

    Raises:
        ValueError: one of these is something else.
    """
    pair = [as_integer(each) for each in (bits if isinstance(bits, tuple) else (bits, bits))]
    if len(pair) != 2 or any(each not in BITS for each in pair):
        raise ValueError(f"bits must be 8, 4 or 2, or a pair of these for keys and values, got {bits!r}.")
    size = as_integer(group_size)
    if size is None or size <= 0 or size % CHUNK:
        raise ValueError(f"group_size must be a positive multiple of {CHUNK}, got {group_size!r}.")
    if not isinstance(rotate, bool) and rotate != "auto":
        raise ValueError(f"rotate must be 'auto', True or False, got {rotate!r}.")
    is_fitted = rotate != "auto"
    if not isinstance(auto_bits, bool) or (auto_bits and is_fitted):
        raise ValueError(f"auto_bits must be True or False, and needs rotate='auto', got {auto_bits!r} and {rotate!r}.")
    keys, values = (
        MinMaxCodec(each, size, role == 0, rotate is not False, is_fitted=is_fitted)
        for role, each in enumerate(pair)
        if each is not None
    )
    return KVCodec(keys, values, sink_tokens, auto_bits)
