"""
Instructions that the processor has, and whether the kernels use those for integer dot products.

Numba compiles for the processor of this machine, or for the one that `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` name.
Nothing else is asked, so instructions that are hidden there are hidden from the whole package.
"""

import sys
from functools import cache
from typing import Any

from numba.core.registry import cpu_target

# Instructions for integer dot products, by the features that they need.
AVX512_VNNI = ("avx512f", "avx512vnni")
AVX_VNNI = ("avxvnni",)
AVX512 = ("avx512f", "avx512bw")
AVX2 = ("avx2",)
_AVX512_BF16 = ("avx512f", "avx512bw", "avx512bf16")
_AMX = ("amx-bf16",)
_AARCH64_BF16 = ("bf16",)

_wanted: bool | None = None


def has_feature(context: Any, feature: str) -> bool:
    """Whether code is compiled for a processor with `feature`."""
    return f"+{feature}" in context.codegen().magic_tuple()[2].split(",")


@cache
def has_features(features: tuple[str, ...]) -> bool:
    """Whether code is compiled for a processor with all of these features."""
    return all(has_feature(cpu_target.target_context, feature) for feature in features)


@cache
def has_pair_dot() -> bool:
    """Whether there are dot products of pairs of 16-bit integers (x86-64 with AVX2)."""
    return any(map(has_features, (AVX512_VNNI, AVX_VNNI, AVX512, AVX2)))


def has_gemm() -> bool:
    """Whether four products of 8-bit integers are added to 32 bits in one instruction (x86-64 with AVX512-VNNI)."""
    return has_features(AVX512_VNNI)


def has_products_of_bytes(bits: int) -> bool:
    """
    Whether codes of so many bits are multiplied with 8-bit integers, four at a time, faster than float32.

    Without VNNI (x86-64 with AVX2) two products are added in 16 bits, where those of codes of 8 bits have no place.
    """
    return has_features(AVX512_VNNI) or has_features(AVX_VNNI) or (bits <= 4 and has_pair_dot())


def has_bfloat16_products() -> bool:
    """Whether bfloat16 are multiplied in pairs (x86-64 with AVX512-BF16)."""
    return sys.byteorder == "little" and has_features(_AVX512_BF16)


def has_amx() -> bool:
    """Whether tiles of bfloat16 are multiplied (x86-64 with AMX), as torch does; the kernels do not."""
    return has_features(_AMX)


def has_fast_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 as it is; elsewhere it is converted to float32 first."""
    return any(map(has_features, (_AVX512_BF16, _AMX, _AARCH64_BF16)))


def set_integer_kernels(enabled: bool | None) -> None:
    """
    Let the kernels use integer dot products, or not, in the whole process.

    In attention over quantized blocks, integer dot products round the query and the weights relative to the largest of
    their row and block: to 16 bits for codes of 8 bits, to 8 bits for smaller codes. In products of a prompt with
    quantized weights, they round the tokens to 8 bits between the least and the largest of 32 channels, with weights in
    8 bits only if the processor has VNNI.

    Args:
        enabled: `None`, the default, uses them if the processor has them (x86-64 with AVX2). `False` uses the portable
            way, which is slower and rounds to 24 bits.

    Raises:
        ValueError: `enabled` is `True`, and the processor has no integer dot products.
    """
    global _wanted
    if enabled and not has_pair_dot():
        raise ValueError("This processor has no integer dot products: it has no AVX2. Use None or False.")
    _wanted = enabled


def uses_integer_kernels() -> bool:
    """Whether the kernels use integer dot products."""
    return has_pair_dot() if _wanted is None else _wanted
