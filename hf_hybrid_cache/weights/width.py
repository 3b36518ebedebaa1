"""The format of quantized weights: bits and group size."""

from typing import NamedTuple

from ..kernels import WEIGHT_BITS
from ..scalars import as_integer

GROUP_SIZE, HEAD_BITS = 32, 8
_ALLOWED_GROUP_SIZES = (32, 64, 128)


class Width(NamedTuple):
    """
    Bits and group size of quantized weights.

    Attributes:
        bits: of a code.
        group_size: number of weights in a row that share a scale.
        head_bits: of a code of the output head.
    """

    bits: int
    group_size: int
    head_bits: int

    @classmethod
    def checked(
        cls, bits: int, group_size: int = GROUP_SIZE, head_bits: int = HEAD_BITS, name: str = "bits"
    ) -> "Width":
        """
        A width from a user's numbers.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is not supported.
        """
        bits, group_size, head_bits = (
            checked_integer(label, given)
            for label, given in ((name, bits), ("group_size", group_size), ("head_bits", head_bits))
        )
        if bits not in WEIGHT_BITS:
            raise ValueError(f"{name} must be 8 or 4, got {bits}. Leave it out for the weights as they are.")
        if head_bits not in WEIGHT_BITS:
            raise ValueError(f"head_bits must be 8 or 4, got {head_bits}.")
        if group_size not in _ALLOWED_GROUP_SIZES:
            raise ValueError(f"group_size must be 32, 64 or 128, got {group_size}.")
        return cls(bits, group_size, head_bits)


def checked_integer(name: str, given: object) -> int:
    """
    A user's number as an integer.

    Raises:
        TypeError: it is not an integer.
    """
    integer = as_integer(given)
    if integer is None:
        raise TypeError(f"{name} must be an integer, got {given!r}.")
    return integer


def checked_bool(name: str, given: object) -> bool:
    """
    A user's switch as a bool.

    Raises:
        TypeError: it is not a bool.
    """
    if not isinstance(given, bool):
        raise TypeError(f"{name} must be True or False, got {given!r}.")
    return given
