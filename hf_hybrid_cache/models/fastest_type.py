"""The dtype in which this processor reads a prompt fastest."""

import torch
from llvmlite import binding

# AVX512-BF16 and AMX of x86-64, and BF16 of AArch64; elsewhere bfloat16 is multiplied as float32, and converted first.
_MULTIPLY_BFLOAT16 = ("avx512bf16", "amx-bf16", "bf16")


def fastest_dtype() -> torch.dtype:
    """Return bfloat16 if this processor has instructions that multiply it, else float32."""
    features = binding.get_host_cpu_features()
    return torch.bfloat16 if any(map(features.get, _MULTIPLY_BFLOAT16)) else torch.float32
