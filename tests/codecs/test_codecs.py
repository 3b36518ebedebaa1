"""Codecs: what they keep, what they refuse, and that records mean the same on a processor and on an accelerator."""

import sys
from typing import ClassVar

import hypothesis.strategies as st
import pytest
import torch
from contracts.codecs import CodecContract, random_states, read
from hypothesis import given

from hf_hybrid_cache import KVCodec, minmax, quanto
from hf_hybrid_cache.codecs.minmax import MinMaxCodec
from hf_hybrid_cache.codecs.torch_quantization import dequantize_by_torch, quantize_by_torch

from common.channel_scaled import channel_scaled
from common.soak import search_at_random

BITS = [8, 4, 2]


class MinMaxContract(CodecContract):
    bits: ClassVar[int]
    rotate: ClassVar[bool] = False

    def make(self) -> KVCodec:
        return minmax(self.bits, rotate=self.rotate)


class TestOf8Bits(MinMaxContract):
    bits, error = 8, 0.02


class TestOf4Bits(MinMaxContract):
    bits, error = 4, 0.2


class TestRotatedOf4Bits(TestOf4Bits):
    rotate = True


class TestOf2Bits(MinMaxContract):
    bits, error = 2, 0.7


class TestRotatedOf2Bits(TestOf2Bits):
    rotate = True


class TestBalanced(CodecContract):
    error = 0.02
    dims = (16,)  # the head_dim that it was scaled for

    def make(self) -> KVCodec:
        return channel_scaled(minmax(8), num_kv_heads=3, key_dim=16, value_dim=16)


class TestQuanto(CodecContract):
    bits, error = 4, 0.12

    def make(self) -> KVCodec:
        pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: pip install hf_hybrid_cache[quanto]")
        return quanto(self.bits)


class TestQuantoOf2Bits(TestQuanto):
    bits, error = 2, 0.6


@pytest.mark.parametrize("bits", [4, 2])
def test_codes_of_quanto_when_decoded_then_are_numbers_of_quanto(bits: int):
    library = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: pip install hf_hybrid_cache[quanto]")
    given, codec = random_states(24), quanto(bits).keys
    groups = given.reshape(-1, 64).T
    optimizer, kind = library.MaxOptimizer(), library.qint4 if bits == 4 else library.qint2
    scale, shift = (each.bfloat16().float() for each in optimizer(groups, kind, -1, 64))
    codes = torch.ops.quanto.quantize_affine(groups, bits, -1, 64, scale, shift)
    assert torch.equal(read(codec, given), (scale * codes - shift).T.reshape(given.shape))


@search_at_random(20)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dim=st.sampled_from([64, 80, 24, 128, 130]),
    codec=st.builds(
        MinMaxCodec, st.sampled_from(BITS), st.sampled_from([16, 64]), st.booleans(), is_rotated=st.booleans()
    ),
)
def test_operations_of_torch_write_and_read_the_records_of_the_kernels(
    codec: MinMaxCodec, dim: int, dtype: torch.dtype
):
    layout, states = codec.layout(dim), random_states(dim, dtype=dtype)
    ours, theirs = codec.encode(states), quantize_by_torch(states, layout, codec._share)
    assert ours.shape == theirs.shape == (2, 3, 3, codec.packed_bytes(dim))
    decoded = torch.empty_like(states)
    codec.decode(ours, decoded)
    torch.testing.assert_close(decoded, dequantize_by_torch(ours, layout).to(dtype), rtol=1e-2, atol=1e-5)
    # Numbers that lie between two codes may get either; both are as far off.
    assert (ours != theirs).float().mean() < 0.05
    errors = [(dequantize_by_torch(packed, layout) - states.float()).square().mean() for packed in (ours, theirs)]
    torch.testing.assert_close(*errors, rtol=1e-2, atol=0)
    largest = torch.finfo(torch.float32).max * states.float().clamp(-1, 1)
    if not codec.is_rotated:
        assert dequantize_by_torch(quantize_by_torch(0.24 * largest, layout, codec._share), layout).isfinite().all()
    for refused in (states * torch.inf, largest):
        with pytest.raises(ValueError, match="infinite, not a number, or so large"):
            quantize_by_torch(refused, layout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, "bits must be 8, 4 or 2, or a pair .* got 3"),
        ({"bits": True}, "bits must be"),
        ({"bits": "4"}, "bits must be"),
        ({"bits": (4, 16)}, r"got \(4, 16\)"),
        ({"bits": (4, 2, 2)}, "bits must be"),
        ({"group_size": 0}, "group_size must be a positive multiple of 16, got 0"),
        ({"group_size": 40}, "got 40"),
        ({"group_size": 64.0}, "got 64.0"),
        ({"sink_tokens": -1}, "sink_tokens must be an integer of at least 0, got -1"),
        ({"sink_tokens": True}, "sink_tokens must be"),
    ],
)
def test_arguments_that_make_no_codec_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        minmax(**arguments)


def test_a_device_that_autocast_does_not_know_has_codes_too():
    codec = channel_scaled(minmax(8), num_kv_heads=2, key_dim=16, value_dim=16).values
    states = torch.empty(1, 2, 64, 16, device="meta")
    packed = torch.empty(1, 2, 1, codec.layout(16).num_bytes, dtype=torch.uint8, device="meta")
    codec.decode(packed, states)
    assert states.shape == (1, 2, 64, 16)


@pytest.mark.parametrize(("sink_tokens", "kept"), [(0, 0), (1, 64), (4, 64), (64, 64), (65, 128)])
def test_first_tokens_are_filled_up_to_whole_blocks(sink_tokens: int, kept: int):
    assert minmax(4, sink_tokens=sink_tokens).sink_tokens == kept


def test_quanto_says_how_to_get_it_and_what_it_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optimum.quanto", None)
    with pytest.raises(ImportError, match=r"pip install hf_hybrid_cache\[quanto\]"):
        quanto(4)
    monkeypatch.undo()
    pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: pip install hf_hybrid_cache[quanto]")
    with pytest.raises(ValueError, match="bits must be 4 or 2 for quanto, got 8"):
        quanto(8)
