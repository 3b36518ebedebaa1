"""The smallest kernels there can be, for tests of how kernels are compiled and kept."""

from hf_hybrid_cache.kernels.vector.compiled import jit


@jit
def small() -> int:
    return 1


@jit
def another() -> int:
    return 2
