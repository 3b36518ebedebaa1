"""How wide coded weights are."""

from typing import NamedTuple

from ..kernels import WEIGHT_BITS

# By bits. The fewer bits, the more a smaller group gains: docs/log.md has the errors.
_GROUP_SIZES = {8: 128, 4: 64}
_ALLOWED_GROUP_SIZES = (32, 64, 128)


class Width(NamedTuple):
    """
    Of coded weights.

    Attributes:
        bits: of a code.
        group_size: weights of a row that share a scale.
    """

    bits: int
    group_size: int

    @classmethod
    def checked(cls, bits: int, group_size: int | None = None, name: str = "bits") -> "Width":
        """
        What a user asks for; without a group size the usual one.

        Raises:
            TypeError: one of them is not an integer.
            ValueError: there are no such weights.
        """
        for label, value in ((name, bits), ("group_size", group_size)):
            if (value is not None or label == name) and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{label} must be an integer, got {value!r}.")
        if bits not in WEIGHT_BITS:
            raise ValueError(f"{name} must be 8 or 4, got {bits}. Leave it out for the weights as they are.")
        if group_size is not None and group_size not in _ALLOWED_GROUP_SIZES:
            raise ValueError(f"group_size must be 32, 64 or 128, got {group_size}.")
        return cls(bits, _GROUP_SIZES[bits] if group_size is None else group_size)
