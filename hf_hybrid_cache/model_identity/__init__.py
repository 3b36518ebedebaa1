"""The identity of a model: all that its states depend on beside the tokens, so that no other model uses them."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names
from .identity import RANK, Identity, ModelIdentityError

if TYPE_CHECKING:
    from .code import longest_text
    from .fields import identity_of
    from .weights import tensor_digests

__all__ = ["RANK", "Identity", "ModelIdentityError", "identity_of", "longest_text", "tensor_digests"]

__getattr__ = lazy_names(
    __name__, {"code": ("longest_text",), "fields": ("identity_of",), "weights": ("tensor_digests",)}
)
