"""The decode phase on the CPU, for a model whose prefill is computed elsewhere."""

from .decode_on_cpu import DecodeOnCPU

__all__ = ["DecodeOnCPU"]
