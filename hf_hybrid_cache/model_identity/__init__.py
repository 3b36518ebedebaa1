"""The identity of a model: all that its states depend on beside the tokens, so that no other model uses them."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .fields import identity_of as identity_of
    from .fields import longest_text as longest_text
    from .identity import RANK as RANK
    from .identity import Identity as Identity
    from .identity import ModelIdentityError as ModelIdentityError
    from .weights import digest_of_tensors as digest_of_tensors

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "identity": ("RANK", "Identity", "ModelIdentityError"),
        "fields": ("identity_of", "longest_text"),
        "weights": ("digest_of_tensors",),
    },
)
