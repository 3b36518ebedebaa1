"""The identity of a model: all that its states depend on beside the tokens, so that no other model uses them."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names
from .identity import RANK, Identity, ModelIdentityError

if TYPE_CHECKING:
    from .fields import identity_of
    from .modules import longest_text
    from .weights import digest_of_tensors

__all__ = ["RANK", "Identity", "ModelIdentityError", "digest_of_tensors", "identity_of", "longest_text"]

__getattr__ = lazy_names(
    __name__, {"fields": ("identity_of",), "modules": ("longest_text",), "weights": ("digest_of_tensors",)}
)
