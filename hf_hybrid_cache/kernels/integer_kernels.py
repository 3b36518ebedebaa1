"""Whether the kernels for quantized blocks, and for many tokens with quantized weights, use integer dot products."""

from .vector.processor import has_pair_dot

_wanted: bool | None = None


def set_integer_kernels(enabled: bool | None) -> None:
    """
    Let the kernels use integer dot products, or not, in the whole process.

    In attention over quantized blocks, integer dot products round the query and the weights relative to the largest of
    their row and block: to 16 bits for codes of 8 bits, to 8 bits for smaller codes. In products of a prompt with
    quantized weights, they round the tokens to 8 bits between the least and the largest of 32 channels, if the
    processor has the instruction (x86-64 with AVX512-VNNI).

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
