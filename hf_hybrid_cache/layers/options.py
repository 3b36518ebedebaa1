"""A user's options of layers: where they live. Plain numbers, no tensors."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

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
        resident_layers: number of layers that keep a copy on the device, until it lacks memory for a layer in use.
        pin_memory: page-lock the host memory, so that copies run beside the computation; `None` does so for CUDA.
        cpu_decode: keep layers in host memory and attend to them there, with a kernel, when few tokens come at once:
            `True` all layers, `False` none, `None` those of a model that is on the CPU itself, or the indices of some.
            A number between 0 and 1 is the CPU fraction of each layer's tokens in host memory: the CPU attends to the
            oldest, and the others are streamed to the device, which attends to them meanwhile. Resident layers stay
            there. `"auto"` finds the fraction while decoding.
        device_tokens: most tokens of each layer in host memory that are on the device instead: the first and the most
            recent ones. Attention to them is merged with attention to the others. 0 for none; at least 128 with a CPU
            fraction in `cpu_decode`.
        adapts: move the CPU fraction while decoding, until CPU and device end together.

    Raises:
        ValueError: a negative count or index, a CPU fraction that is none, or `device_tokens` that are too few, or of
            layers that are on the device anyway.
    """

    offload: bool = False
    prefetch_layers: int = 1
    resident_layers: int = 0
    pin_memory: bool | None = None
    cpu_decode: bool | float | Collection[int] | Literal["auto"] | None = None
    device_tokens: int = 0
    adapts: bool = False

    def __post_init__(self) -> None:
        for name in ("prefetch_layers", "resident_layers", "device_tokens"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name)))
        if isinstance(self.cpu_decode, str) and self.cpu_decode == "auto":
            object.__setattr__(self, "cpu_decode", _FIRST_CPU_FRACTION)
            object.__setattr__(self, "adapts", True)
        share = as_float(self.cpu_decode)
        if share is not None and as_integer(self.cpu_decode) is None:
            object.__setattr__(self, "cpu_decode", share)
        if isinstance(self.cpu_decode, float):
            if not 0 < self.cpu_decode < 1:
                raise ValueError(
                    f"cpu_decode={self.cpu_decode} is not a share between 0 and 1. For all tokens in host memory use "
                    "True, for none False."
                )
            object.__setattr__(self, "device_tokens", self.device_tokens or LEAST_DEVICE_TOKENS)
        elif self.cpu_decode is not None and not isinstance(self.cpu_decode, bool):
            expected = "cpu_decode must be True, False, None, a share between 0 and 1 or a collection of layer indices"
            object.__setattr__(self, "cpu_decode", _layer_indices(self.cpu_decode, expected))
        if self.adapts and self.cpu_fraction is None:
            raise ValueError("adapts=True moves a share of tokens: pass one, such as cpu_decode=0.5.")
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
    def cpu_layers(self) -> frozenset[int]:
        """Indices of the layers that `cpu_decode` names."""
        return self.cpu_decode if isinstance(self.cpu_decode, frozenset) else frozenset()

    @property
    def cpu_fraction(self) -> float | None:
        """The CPU fraction; `None` if the CPU attends to all or none of a layer's tokens in host memory."""
        return self.cpu_decode if isinstance(self.cpu_decode, float) else None

    def attends_on_cpu(self, layer: int, computes_on_cpu: bool) -> bool:
        """Return whether the CPU attends to `layer`, in a model that computes there or elsewhere."""
        if isinstance(self.cpu_decode, frozenset):
            return layer in self.cpu_decode
        return computes_on_cpu if self.cpu_decode is None else bool(self.cpu_decode)

    def resident_ordinals(self, num_layers: int) -> frozenset[int]:
        """
        Return the ordinals of the layers that stay on the device, among `num_layers` that could be streamed.

        Layers are used in a cycle, so the least recently used one is always the next one needed: a fixed set beats any
        eviction policy. It is spread evenly, so that the bus works through the whole step instead of part of it.

        Raises:
            ValueError: more resident layers than layers.
        """
        if self.resident_layers > num_layers:
            raise ValueError(
                f"resident_layers={self.resident_layers}, but the model has {num_layers} full-attention layers. "
                f"Use at most {num_layers}, or DynamicHybridCache to keep every layer on the device."
            )
        return frozenset(i * num_layers // self.resident_layers for i in range(self.resident_layers))


def _layer_indices(given: object, expected: str) -> frozenset[int]:
    """Return a user's collection of indices of layers as a set; `ValueError` with what is expected if it is none."""
    members: Collection[Any] = given if isinstance(given, Collection) else [None]
    indices = [index for member in members if (index := as_integer(member)) is not None and index >= 0]
    if len(indices) < len(members):
        raise ValueError(f"{expected}, got {given!r}.")
    return frozenset(indices)
