"""The identity of a model: all that its states depend on beside the tokens, so that no other model uses them."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .errors import ModelIdentityError
    from .hashed_tensors import tensor_digests
    from .identity import Identity
    from .model_fields import RANK, identity_of
    from .rotations import longest_text

__all__ = ["RANK", "Identity", "ModelIdentityError", "identity_of", "longest_text", "tensor_digests"]

__getattr__ = lazy_names(
    __name__,
    {
        "errors": ("ModelIdentityError",),
        "identity": ("Identity",),
        "model_fields": ("RANK", "identity_of"),
        "rotations": ("longest_text",),
        "hashed_tensors": ("tensor_digests",),
    },
)
