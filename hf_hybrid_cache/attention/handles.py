"""
Tensors that `update` returns instead of keys and values: handles, or keys that show which queries attend to them.

In transformers the attention function never sees the cache, only the results of `update`. A handle is a tensor in
shape, type and device, without states. It answers `torch.nn.functional.scaled_dot_product_attention`, which the default
implementation calls, by attention over the store, and so do the operations of attention that is written out (`scores`).
Any other operation on it gets the real states, so that every other implementation is right too, if slower. Nothing of
torch or transformers is patched.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from ..graph_breaks import outside_of_graphs
from ..storage import AnyStore, Pair
from .quantized_attention import QuantizedAttention
from .queries import Queries, covers
from .scores import LazyTensor, Product, Scores, StaleHandleError, scores_of
from .stored_attention import StoredAttention

_View = Callable[[torch.Tensor], torch.Tensor]


class LayerView:
    """
    One layer as it was when its handles were made.

    Args:
        store: of the layer.
        attention: that the handles stand for.
        tokens: the store that is attended to: the layer's, or one of its first tokens as they came.
        came: a copy of these, if the layer's codec is to be chosen.
    """

    def __init__(
        self,
        store: AnyStore,
        attention: StoredAttention | QuantizedAttention,
        tokens: AnyStore,
        came: Pair | None = None,
    ):
        self.attention, self.tokens, self.shape, self._came = attention, tokens, store.shape, came
        self._store, self._version = store, store.version
        self._states: Pair | None = None

    @property
    def store(self) -> AnyStore:
        """
        The layer's store.

        Raises:
            StaleHandleError: it has changed since.
        """
        if self._store.version != self._version:
            raise StaleHandleError(
                "The keys and values that update() returned were used after the cache had changed. Use them before the "
                "next update, crop or reset, or pass cpu_decode=False to get tensors of their own."
            )
        return self._store

    def attend(self, queries: Queries, is_mask_added: bool = False) -> torch.Tensor:
        """Return attention of queries, which the store may need to choose a codec."""
        store, mask = self.store, queries.mask
        if store.wants_queries:
            store.observe(queries.states, self._came)
            self._came = None
        if is_mask_added and mask is not None and mask.dtype != torch.bool:
            assert isinstance(self.attention, StoredAttention)
            queries = queries._replace(mask=self.attention.simplified.of(mask))
        return self.attention(queries, self.tokens)

    def states(self, what: str) -> Pair:
        """Return the real keys and values, which `what` reads, on the device of the model, brought once for both."""
        store = self.store
        if self._states is None:
            self.attention.decline(what, store.num_tokens)
            keys, values = self.tokens.read()
            self._states = (observed(keys, store.observe) if store.wants_queries else keys), values
        return self._states


class KVHandle(LazyTensor):
    """
    All keys, or all values, of a layer in host memory, or a view that transformers' `repeat_kv` takes of them.

    Attributes:
        layer: layer that it stands for.
        role: 0 for keys, 1 for values.
        views: functions that make this view out of the real states.
        is_transposed: its last axis are the tokens.
    """

    layer: LayerView
    role: int
    _shape: torch.Size
    views: tuple[_View, ...]
    is_transposed: bool
    # Torch's own property would go through `__torch_function__`, several times a step.
    shape = property(attrgetter("_shape"), doc="The shape of the states.")

    @staticmethod
    def make(
        layer: LayerView, role: int, shape: torch.Size, views: tuple[_View, ...] = (), is_transposed: bool = False
    ) -> "KVHandle":
        states = layer.shape
        dtype = states.value_dtype if role else states.key_dtype
        handle = torch.Tensor._make_wrapper_subclass(KVHandle, shape, dtype=dtype, device=states.device)
        handle.layer, handle.role, handle._shape, handle.views = layer, role, shape, views
        handle.is_transposed = is_transposed
        return handle

    def numbers(self, what: str) -> torch.Tensor:
        states = self.layer.states(what)[self.role]
        for view in self.views:
            states = view(states)
        return states

    @classmethod
    @outside_of_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            result = _attend(*args, **kwargs)
            if result is not None:
                return result
            args, kwargs = _with_states("scaled_dot_product_attention with such arguments", args, kwargs)
        elif func is torch.Tensor.to and _is_there(*args, **kwargs):
            return args[0]
        elif func in _PRODUCTS and len(args) == 2 and not kwargs:
            scores = _scores(*args)
            if scores is not None:
                return scores
        elif func in _REPEATING and isinstance(args[0], KVHandle) and not args[0].is_transposed and not kwargs:
            handle, *arguments = args
            shape = _REPEATING[func](handle._shape, *arguments)
            if shape is not None:
                views = (*handle.views, lambda states: func(states, *arguments))
                return KVHandle.make(handle.layer, handle.role, shape, views, func is torch.Tensor.transpose)
        if func in _OBSERVED and any(isinstance(each, KVHandle) and each.layer.store.wants_queries for each in args):
            args, kwargs = _with_states(func.__name__, args, kwargs)
            return func(*args, **kwargs)
        if func in _NOT_DISPATCHED:
            args, kwargs = _with_states(func.__name__, args, kwargs)
        # The handle itself answers shape, type and device; operations that need data end in __torch_dispatch__.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def handles_of(
    store: AnyStore,
    attention: StoredAttention | QuantizedAttention,
    tokens: AnyStore | None = None,
    came: Pair | None = None,
) -> tuple[KVHandle, KVHandle]:
    """Make handles of all keys and all values, `[batch, num_kv_heads, tokens, head_dim]`; see `LayerView`."""
    layer, shape = LayerView(store, attention, store if tokens is None else tokens, came), store.shape
    batch, num_kv_heads, num_tokens = shape.batch, shape.num_kv_heads, store.num_shown
    return (
        KVHandle.make(layer, 0, torch.Size((batch, num_kv_heads, num_tokens, shape.key_dim))),
        KVHandle.make(layer, 1, torch.Size((batch, num_kv_heads, num_tokens, shape.value_dim))),
    )


def _with_states(what: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of an operation with the real states in the places of handles."""
    result: tuple[Any, Any] = tree_map_only(KVHandle, lambda handle: handle.numbers(what), (args, kwargs))
    return result


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Compute `scaled_dot_product_attention` over the store; `None` for a call that it does not cover."""
    if not (isinstance(key, KVHandle) and isinstance(value, KVHandle)) or isinstance(query, KVHandle):
        return None
    layer, sizes, shape = key.layer, query.shape, key._shape
    if layer is not value.layer or len(sizes) != 4 or len(shape) != 4:
        return None
    states = layer.shape
    batch, query_heads, length, query_dim = sizes
    kv_batch, heads, tokens, head_dim = shape
    fits = (
        (key.role, value.role) == (0, 1)
        and value._shape[:3] == shape[:3]
        and batch == kv_batch
        and query_dim == head_dim
        and query.dtype == states.key_dtype
        and query.device == states.device
        and (query_heads == heads or (enable_gqa and query_heads % heads == 0))
    )
    if not fits or dropout_p > 0 or (torch.is_grad_enabled() and query.requires_grad):
        return None
    if attn_mask is not None:
        if isinstance(attn_mask, KVHandle) or not covers(attn_mask, query, tokens):
            return None
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if is_causal:
        attention, is_prompt = layer.attention, attn_mask is None and length == tokens
        if not (is_prompt and isinstance(attention, StoredAttention) and attention.takes_prompts(layer.tokens)):
            return None
    queries = Queries(query, query_heads // states.num_kv_heads, scale, attn_mask, is_causal)
    return layer.attend(queries)


def _scores(query: object, keys: object) -> Scores | None:
    """Return the scores of queries that are multiplied with transposed keys; `None` for any other product."""
    if not (isinstance(keys, KVHandle) and keys.is_transposed and isinstance(query, torch.Tensor)):
        return None
    if isinstance(query, LazyTensor) or query.dim() != 4:
        return None
    layer, states, (batch, heads, _, head_dim), keys_shape = keys.layer, keys.layer.shape, query.shape, keys._shape
    fits = (
        keys_shape[:3] == (batch, heads, head_dim)
        and heads % states.num_kv_heads == 0
        and query.dtype == states.key_dtype
        and query.device == states.device
        and isinstance(layer.attention, StoredAttention)
    )
    if not fits or (torch.is_grad_enabled() and query.requires_grad) or torch.is_autocast_enabled(query.device.type):
        return None
    assert isinstance(layer.attention, StoredAttention)

    def attend(queries: Queries, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        if not isinstance(values, KVHandle) or values.layer is not layer or values.role != 1 or values.is_transposed:
            return None
        if values._shape[:3] != (batch, heads, keys_shape[3]):
            return None
        return layer.attend(queries, is_mask_added=True).to(dtype)

    product = Product(attend)
    layer.attention.products.add(product)
    queries = Queries(query, heads // states.num_kv_heads, 1.0)
    return scores_of(product, queries, keys_shape[3], lambda what: query @ keys.numbers(what))


def _is_there(handle: object, *target: Any, **options: Any) -> bool:
    """Return whether a handle that is moved stays on its device; models that share keys and values move handles."""
    device = target[0] if len(target) == 1 and not options else None
    return isinstance(handle, KVHandle) and isinstance(device, torch.device) and device == handle.device


def _new_axis(shape: torch.Size, index: Any) -> torch.Size | None:
    whole = slice(None)
    if len(shape) != 4 or not isinstance(index, tuple) or any(isinstance(item, torch.Tensor) for item in index):
        return None
    return torch.Size((*shape[:2], 1, *shape[2:])) if index == (whole, whole, None, whole, whole) else None


def _expanded(shape: torch.Size, *sizes: Any) -> torch.Size | None:
    wanted = _as_size(sizes)
    same = len(wanted) == len(shape) == 5 and wanted[:2] + wanted[3:] == shape[:2] + shape[3:]
    return wanted if same and shape[2] == 1 else None


def _flattened(shape: torch.Size, *sizes: Any) -> torch.Size | None:
    wanted = _as_size(sizes)
    same = len(shape) == 5 and wanted == (shape[0], shape[1] * shape[2], *shape[3:])
    return wanted if same else None


def _transposed(shape: torch.Size, *axes: Any) -> torch.Size | None:
    if len(shape) != 4 or len(axes) != 2 or {axis % 4 for axis in axes} != {2, 3}:
        return None
    return torch.Size((*shape[:2], shape[3], shape[2]))


def _as_size(sizes: tuple[Any, ...]) -> torch.Size:
    return torch.Size(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes)


class ObservedKeys(torch.Tensor):
    """
    The keys themselves, or a view that attention takes of them; results of all other operations are plain tensors.

    The observer is called with the queries of `scaled_dot_product_attention`, and of a product with a matrix of these
    keys, as in transformers' eager attention. Attention that goes past both is not observed.
    """

    _observer: Callable[[torch.Tensor], None]
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


def observed(keys: torch.Tensor, observer: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return `keys`, which show `observer` the queries that attend to them, until a codec is chosen."""
    result = keys.as_subclass(ObservedKeys)
    result._observer, result._source = observer, keys
    return result


# Methods that torch refuses for a subclass before it asks the subclass.
_NOT_DISPATCHED = {torch.Tensor.tolist, torch.Tensor.numpy}

# The three operations of transformers' `repeat_kv`, and what attention that is written out makes of keys then; with the
# shape each gives, or `None` for another use of it.
_REPEATING: dict[Any, Callable[..., torch.Size | None]] = {
    torch.Tensor.__getitem__: _new_axis,
    torch.Tensor.expand: _expanded,
    torch.Tensor.reshape: _flattened,
    torch.Tensor.transpose: _transposed,
}

# What observed keys answer.
_PRODUCTS = {scaled_dot_product_attention, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
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
_OBSERVED = _PRODUCTS | _VIEWS
