"""Codes of optimum-quanto, for comparison with ours: 4 or 2 bits, a scale and a shift for each 64 numbers."""

from dataclasses import dataclass

import torch

from ..kernels import NOT_FINITE
from ..scalars import as_integer
from ..storage import GRANULE, Codec, KVCodec

GROUP = 64
_BITS = (4, 2)


@dataclass(frozen=True)
class QuantoCodec(Codec):
    """
    Numbers in groups of 64 that follow each other in a block, token after token, as transformers' `QuantizedCache` has
    them by default. Scales and shifts are kept as bfloat16.

    Attributes:
        bits: 4 or 2.
    """

    bits: int

    def __str__(self) -> str:
        return f"{self.bits} bits (quanto)"

    def packed_bytes(self, head_dim: int) -> int:
        # There are as many groups as head_dim: 64 tokens in groups of 64.
        return head_dim * (GROUP * self.bits // 8 + 4)

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight

        if not torch.isfinite(states).all():
            raise ValueError(NOT_FINITE)
        batch, heads, tokens, head_dim = states.shape
        blocks = tokens // GRANULE
        if not blocks:
            return states.new_empty((batch, heads, 0, self.packed_bytes(head_dim)), dtype=torch.uint8)
        kind = qint4 if self.bits == 4 else qint2
        # A group is a column, because quanto packs rows together.
        groups = states.float().reshape(-1, GROUP).T.contiguous()
        scale, shift = (each.bfloat16().float() for each in MaxOptimizer()(groups, kind, -1, GROUP))
        if not (scale.isfinite().all() and shift.isfinite().all()):
            raise ValueError("farther apart than any scale")
        quantized = quantize_weight(groups, kind, -1, scale, shift, GROUP)
        parts = [
            quantized._data._data.T.contiguous(),
            *(each.flatten().bfloat16().view(torch.uint8) for each in (scale, shift)),
        ]
        return torch.cat([part.reshape(batch, heads, blocks, -1) for part in parts], dim=3)

    def decode(self, packed: torch.Tensor, states: torch.Tensor) -> None:
        # Not by quanto, which compiles C++ code for it.
        head_dim, size = states.shape[3], GROUP * self.bits // 8
        if not packed.shape[2]:
            return
        data, scale, shift = packed.split([head_dim * size, head_dim * 2, head_dim * 2], dim=3)
        data = data.reshape(-1, size)
        codes = torch.cat([data >> first & 2**self.bits - 1 for first in range(0, 8, self.bits)], dim=1)
        scale, shift = (each.contiguous().view(torch.bfloat16).float().reshape(-1, 1) for each in (scale, shift))
        states.copy_((scale * codes - shift).reshape(states.shape))


def quanto(bits: int = 4, sink_tokens: int = GRANULE) -> KVCodec:
    """
    Codes of optimum-quanto for keys and values.

    Args:
        bits: 4 or 2.
        sink_tokens: first tokens that stay in full precision, filled up to whole blocks of 64.

    Raises:
        ImportError: optimum-quanto is not installed.
        ValueError: one of these is something else.
    """
    try:
        import optimum.quanto  # noqa: F401
    except ImportError as error:
        raise ImportError("This codec needs optimum-quanto: pip install hf_hybrid_cache[quanto]") from error
    number = as_integer(bits)
    if number is None or number not in _BITS:
        raise ValueError(f"bits must be 4 or 2 for quanto, got {bits!r}.")
    codec = QuantoCodec(number)
    return KVCodec(codec, codec, sink_tokens)
