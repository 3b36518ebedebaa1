"""A user's options of layers: where they live. Plain numbers, no tensors."""

from dataclasses import dataclass
from typing import Literal

from ..scalars import as_float, as_integer

# A block of 64 first tokens, and one of recent tokens.
LEAST_DEVICE_TOKENS = 128
_FIRST_CPU_FRACTION = 0.5


def checked_count(name: str, given: object) -> int:
    """
    Return a number of layers or tokens that a user gave, checked.

    Raises:
        ValueError: it is not an integer of at least 0.
    """
    count = as_integer(given)
    if count is None or count < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {given!r}.")
    return count


@dataclass(frozen=True)
class Placement:
    """
    The places where the keys and values of the full-attention layers live.

    Args:
        offload: keep them in host memory and stream them to the compute device; `False` keeps them on the device.
        prefetch_layers: number of layers that are on their way to the device while one is attended to.
        pin_memory: page-lock the host memory where torch can, so that copies run beside the computation.
        cpu_decode: keep layers in host memory and attend to them there, with a kernel, when few tokens come at once:
            `True`, `False`, or `None` if the model is on the CPU itself. A number between 0 and 1 is the CPU fraction
            of each layer's tokens in host memory: the CPU attends to the oldest, and the others are streamed to the
            device, which attends to them meanwhile. `"auto"` finds the fraction while decoding.
        device_tokens: most tokens of each layer in host memory that are on the device instead: the first and the most
            recent ones. Attention to them is merged with attention to the others. 0 for none; at least 128 with a CPU
            fraction in `cpu_decode`.

    Raises:
        ValueError: a negative count, a CPU fraction that is none, or `device_tokens` that are too few, or of
            layers that are on the device anyway.
    """

    offload: bool = False
    prefetch_layers: int = 1
    pin_memory: bool = True
    cpu_decode: bool | float | Literal["auto"] | None = None
    device_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("prefetch_layers", "device_tokens"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name)))
        share = as_float(self.cpu_decode) if as_integer(self.cpu_decode) is None else None
        if share is not None:
            if not 0 < share < 1:
                raise ValueError(
                    f"cpu_decode={share} is not a share between 0 and 1. For all tokens in host memory use True, for "
                    "none False."
                )
            object.__setattr__(self, "cpu_decode", share)
        elif not (self.cpu_decode is None or isinstance(self.cpu_decode, bool) or self.adapts):
            expected = 'True, False, None, a share between 0 and 1 or "auto"'
            raise ValueError(f"cpu_decode must be {expected}, got {self.cpu_decode!r}.")
        if self.cpu_fraction is not None:
            object.__setattr__(self, "device_tokens", self.device_tokens or LEAST_DEVICE_TOKENS)
        if 0 < self.device_tokens < LEAST_DEVICE_TOKENS:
            raise ValueError(
                f"device_tokens={self.device_tokens} leaves no room for the first and the most recent tokens. Use at "
                f"least {LEAST_DEVICE_TOKENS}, or 0 to keep none on the device."
            )
        if self.device_tokens and not self.offload and self.cpu_decode in (None, False):
            raise ValueError(
                f"device_tokens={self.device_tokens} is for layers in host memory, and all tokens would be on the "
                "device. Pass offload=True or cpu_decode=True too, or leave it out."
            )

    @property
    def adapts(self) -> bool:
        """Whether the CPU fraction moves while decoding, until CPU and device end together."""
        return isinstance(self.cpu_decode, str) and self.cpu_decode == "auto"

    @property
    def cpu_fraction(self) -> float | None:
        """The CPU fraction, at first; `None` if the CPU attends to all or none of a layer's tokens in host memory."""
        return _FIRST_CPU_FRACTION if self.adapts else self.cpu_decode if isinstance(self.cpu_decode, float) else None

    def attends_on_cpu(self, computes_on_cpu: bool) -> bool:
        """Return whether the CPU attends, in a model that computes there or elsewhere."""
        return computes_on_cpu if self.cpu_decode is None else bool(self.cpu_decode)
