"""Keys that show the queries which attend to them; `update` returns them until a codec is chosen."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..graph_breaks import outside_of_graphs

Observer = Callable[[torch.Tensor], None]


class ObservedKeys(torch.Tensor):
    """
    The keys themselves, or a view that attention takes of them; results of all other operations are plain tensors.

    The observer is called with the queries of `scaled_dot_product_attention`, and of a product with a matrix of these
    keys, as in transformers' eager attention. Attention that goes past both is not observed.
    """

    _observer: Observer
    _source: torch.Tensor  # kept, because memory that is lent is lent again once that tensor is gone

    @classmethod
    @outside_of_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        keys = args[1] if func in _PRODUCTS and len(args) > 1 else args[0] if func in _VIEWS else None
        if not isinstance(keys, ObservedKeys):
            return result
        if func in _VIEWS:
            return observed(result, keys._observer)
        if isinstance(args[0], torch.Tensor) and not isinstance(args[0], ObservedKeys):
            keys._observer(args[0])
        return result


def observed(keys: torch.Tensor, observer: Observer) -> torch.Tensor:
    """`keys`, which show `observer` the queries that attend to them."""
    result = keys.as_subclass(ObservedKeys)
    result._observer, result._source = observer, keys
    return result


_PRODUCTS = {
    scaled_dot_product_attention,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
}
_VIEWS = {
    torch.Tensor.__getitem__,
    torch.Tensor.contiguous,
    torch.Tensor.expand,
    torch.Tensor.reshape,
    torch.Tensor.to,
    torch.Tensor.transpose,
    torch.Tensor.type,
    torch.Tensor.view,
}
# Functions that observed keys answer.
OBSERVED = _PRODUCTS | _VIEWS
