"""Asymmetric min-max codes of 8, 4 or 2 bits: keys per channel over tokens, values per token over channels."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..kernels import BITS, LANES, PackedLayout, dequantize_blocks, quantize_blocks
from ..scalars import as_integer
from ..storage import GRANULE, Codec, KVCodec, kernel_array
from .channel_scaling import ChannelScaling, factors_for_keys, rotation_matrix_for_values
from .torch_quantization import as_written, dequantize_by_torch, quantize_by_torch, rotated

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
        batch, heads, _, head_dim = states.shape
        layout, channel_scaling, factors = self.layout(head_dim), self.channel_scaling, None
        with as_written(states.device):
            on_cpu = states.device.type == "cpu"
            if channel_scaling is not None and on_cpu and not channel_scaling.is_matrix:
                factors = channel_scaling.weights.numpy()
            elif channel_scaling is not None:
                states = channel_scaling.applied(states.detach())
            if not on_cpu:
                return quantize_by_torch(states, layout, self._share)
            packed = torch.from_numpy(quantize_blocks(kernel_array(states.detach()), layout, self._share, factors))
            return packed.unflatten(1, (batch, heads)).permute(1, 2, 0, 3)

    def decode(self, packed: torch.Tensor, states: torch.Tensor) -> None:
        with as_written(states.device):
            if states.device.type == "cpu":
                self._decode_by_kernel(packed, states)
                return
            batch, heads, blocks, _ = packed.shape
            layout, channel_scaling = self.layout(states.shape[3]), self.channel_scaling
            block_bytes = 4 * batch * heads * layout.inner * layout.lanes
            step = max(1, _PIECE_BYTES // max(1, block_bytes))
            for start in range(0, blocks, step):
                numbers = dequantize_by_torch(packed[:, :, start : start + step], layout)
                numbers = numbers if channel_scaling is None else channel_scaling.undone(numbers)
                states[:, :, start * GRANULE : (start + step) * GRANULE] = numbers

    def _decode_by_kernel(self, packed: torch.Tensor, states: torch.Tensor) -> None:
        layout, channel_scaling = self.layout(states.shape[3]), self.channel_scaling
        rows = packed.permute(2, 0, 1, 3).flatten(1, 2).contiguous().numpy()
        if channel_scaling is not None and channel_scaling.is_matrix:
            numbers = torch.empty(states.shape)
            dequantize_blocks(rows, layout, numbers.numpy())
            states.copy_(channel_scaling.undone(numbers))
            return
        factors = None if channel_scaling is None else channel_scaling.inverse_array
        if states.dtype in (torch.float32, torch.bfloat16):
            dequantize_blocks(rows, layout, kernel_array(states), factors)
        else:
            numbers = torch.empty(states.shape)
            dequantize_blocks(rows, layout, numbers.numpy(), factors)
            states.copy_(numbers)


def minmax_codecs(codec: KVCodec) -> tuple[MinMaxCodec, MinMaxCodec] | None:
    """Return the codecs of keys and values if both are of this form."""
    keys, values = codec.keys, codec.values
    return (keys, values) if isinstance(keys, MinMaxCodec) and isinstance(values, MinMaxCodec) else None


def is_foldable(codec: KVCodec) -> bool:
    """Whether kernels attend to blocks that are quantized like this."""
    both = minmax_codecs(codec)
    if both is None:
        return False
    keys, values = both
    # Scales of channels fold into the query, scales of tokens into the weights.
    return (
        keys.per_channel
        and not values.per_channel
        and (keys.channel_scaling is None or not keys.channel_scaling.is_matrix)
        and (values.channel_scaling is None or values.channel_scaling.is_matrix)
    )


def folded_codecs(codec: KVCodec) -> tuple[MinMaxCodec, MinMaxCodec]:
    """Return the codecs of keys and values of a codec that `is_foldable`."""
    both = minmax_codecs(codec)
    assert both is not None
    return both


def map_to_states(codec: MinMaxCodec, head_dim: int) -> torch.Tensor | None:
    """
    Return the matrices that turn dequantized numbers into states: rotation and channel scaling undone.

    Returns:
        float32 `[num_kv_heads, head_dim, head_dim]`, or `[1, head_dim, head_dim]` if it is one for all heads; row
        vectors are multiplied by it; `None` if the numbers are the states.
    """
    layout = codec.layout(head_dim)
    if layout.rotation == 1 and codec.channel_scaling is None:
        return None
    plain = torch.eye(head_dim).expand(1, 1, -1, -1)
    with as_written(plain.device):
        turned = rotated(plain, layout)
        return turned[0] if codec.channel_scaling is None else codec.channel_scaling.undone(turned)[0]


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
    if size is None or size <= 0 or size % LANES:
        raise ValueError(f"group_size must be a positive multiple of {LANES}, got {group_size!r}.")
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
