"""Codecs with random channel scaling, as a cache may choose them for some models."""

from dataclasses import replace

import torch

from hf_hybrid_cache import KVCodec
from hf_hybrid_cache.codecs import ChannelScaling, MinMaxCodec


def random_factors(num_kv_heads: int, dim: int, seed: int) -> ChannelScaling:
    generator = torch.Generator().manual_seed(seed)
    return ChannelScaling(torch.exp(torch.randn(num_kv_heads, dim, generator=generator) / 4).bfloat16().float())


def random_rotation_matrix(num_kv_heads: int, dim: int, seed: int) -> ChannelScaling:
    """Return a random symmetric matrix with eigenvalues between 1/2 and 2."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(num_kv_heads, dim, dim, generator=generator)).Q
    scales = 2 ** (2 * torch.rand(num_kv_heads, 1, dim, generator=generator) - 1)
    return ChannelScaling((axes * scales) @ axes.mT)


def channel_scaled(codec: KVCodec, num_kv_heads: int, key_dim: int, value_dim: int, seed: int = 0) -> KVCodec:
    """Return a min-max `codec` with factors for what is quantized per channel and a matrix for the rest."""
    parts = []
    for index, (part, dim) in enumerate([(codec.keys, key_dim), (codec.values, value_dim)]):
        assert isinstance(part, MinMaxCodec)
        make = random_factors if part.per_channel else random_rotation_matrix
        parts.append(replace(part, channel_scaling=make(num_kv_heads, dim, seed + index), is_fitted=True))
    return replace(codec, keys=parts[0], values=parts[1])
