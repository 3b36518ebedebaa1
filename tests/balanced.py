"""Codecs whose channels are balanced at random: what a cache may choose, without a model that makes it do so."""

from dataclasses import replace

import torch

from hf_hybrid_cache import KVCodec
from hf_hybrid_cache.codecs import Balance, MinMaxCodec


def random_factors(num_kv_heads: int, dim: int, seed: int) -> Balance:
    generator = torch.Generator().manual_seed(seed)
    return Balance(torch.exp(torch.randn(num_kv_heads, dim, generator=generator) / 4).bfloat16().float())


def random_mixing(num_kv_heads: int, dim: int, seed: int) -> Balance:
    """Symmetric, with eigenvalues between 1/2 and 2."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(num_kv_heads, dim, dim, generator=generator)).Q
    scales = 2 ** (2 * torch.rand(num_kv_heads, 1, dim, generator=generator) - 1)
    return Balance((axes * scales) @ axes.mT)


def balanced(codec: KVCodec, num_kv_heads: int, key_dim: int, value_dim: int, seed: int = 0) -> KVCodec:
    """`codec`, a min-max one, with factors for what is coded per channel and a matrix for what is coded per token."""
    parts = []
    for index, (part, dim) in enumerate([(codec.keys, key_dim), (codec.values, value_dim)]):
        assert isinstance(part, MinMaxCodec)
        make = random_factors if part.per_channel else random_mixing
        parts.append(replace(part, balance=make(num_kv_heads, dim, seed + index), is_fitted=True))
    return replace(codec, keys=parts[0], values=parts[1])
