"""The contract of every codec of keys and values."""

import copy
from abc import ABC, abstractmethod
from typing import ClassVar

import pytest
import torch

from hf_hybrid_cache.storage import Codec, KVCodec

BLOCK = 64


def random_states(dim: int = 64, tokens: int = 3 * BLOCK, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[batch, num_kv_heads, tokens, head_dim]`."""
    return torch.randn(2, 3, tokens, dim, generator=torch.Generator().manual_seed(0)).to(dtype)


def read(codec: Codec, states: torch.Tensor) -> torch.Tensor:
    """Encode and decode `states`."""
    decoded = torch.full_like(states, torch.nan)
    codec.decode(codec.encode(states), decoded)
    return decoded


class CodecContract(ABC):
    """
    A subclass makes a codec, and says what it loses of keys, and of values.

    Attributes:
        error: the largest root mean square of the errors of normal numbers; a tenth of it is too good to be true.
        dims: widths of states that it can code.
    """

    error: ClassVar[float]
    dims: ClassVar[tuple[int, ...]] = (16, 64, 80, 128)

    @abstractmethod
    def make(self) -> KVCodec:
        """Make a codec that is fitted, if it needs to be."""

    @pytest.fixture(params=["keys", "values"])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        codec: Codec = getattr(self.make(), request.param)
        return codec

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_what_is_read_is_as_close_as_its_bits_allow(self, codec: Codec, dtype: torch.dtype):
        for dim in self.dims:
            states = random_states(dim, dtype=dtype)
            packed, decoded = codec.encode(states), read(codec, states)
            assert self.error / 10 < (decoded.float() - states.float()).square().mean().sqrt() < self.error
            assert packed.dtype == torch.uint8
            assert packed.shape == (2, 3, 3, codec.packed_bytes(dim))
            assert codec.encode(random_states(dim, 0, dtype)).shape == (2, 3, 0, codec.packed_bytes(dim))

    def test_a_block_of_a_sequence_is_coded_and_read_by_itself(self, codec: Codec):
        states = random_states(self.dims[0])
        packed, decoded = codec.encode(states), read(codec, states)
        alone = states[1:, :, BLOCK : 2 * BLOCK]
        assert torch.equal(codec.encode(alone), packed[1:, :, 1:2])
        one = torch.empty_like(alone)
        codec.decode(packed[1:, :, 1:2], one)
        assert torch.equal(one, decoded[1:, :, BLOCK : 2 * BLOCK])
        states[:, :2] *= -3  # another head's codes stay
        assert torch.equal(codec.encode(states)[:, 2], packed[:, 2])

    def test_records_are_the_same_in_any_mode_order_and_copy(self, codec: Codec):
        states = random_states(self.dims[0])
        packed, decoded = codec.encode(states), read(codec, states)
        turned, target = (states.transpose(1, 2).contiguous().transpose(1, 2) for _ in range(2))
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert torch.equal(codec.encode(turned), packed)
            assert torch.equal(read(codec, states), decoded)
        copy.deepcopy(codec).decode(packed, target)
        assert torch.equal(target, decoded)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_codec_when_states_are_not_finite_then_refuses(self, codec: Codec, bad: float):
        states = random_states(self.dims[0])
        states[1, 2, 77, 5] = bad
        with pytest.raises(ValueError, match="infinite, not a number"):
            codec.encode(states)

    @pytest.mark.parametrize("size", [0.0, 1e-40, 1e-30, 1e30, 3.4e38])
    def test_numbers_of_any_size_come_back_finite_or_are_refused(self, codec: Codec, size: float):
        states = random_states(self.dims[0]).clamp(-1, 1) * size
        try:
            packed = codec.encode(states)
        except ValueError:
            return
        decoded = torch.full_like(states, torch.nan)
        codec.decode(packed, decoded)
        assert decoded.isfinite().all()
