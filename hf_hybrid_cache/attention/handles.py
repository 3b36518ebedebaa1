"""
Handles, which `update` returns if attention runs over the store: tensors in shape, type and device, without states.

In transformers the attention function never sees the cache, only the results of `update`. Handles answer
`torch.nn.functional.scaled_dot_product_attention`, which the default implementation calls, by running a kernel over
the store. Any other operation on them gets the real states, so that every other implementation is right too, if
slower. Nothing of torch or transformers is patched.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from ..codecs import as_written
from ..errors import HybridCacheError
from ..graph_breaks import outside_of_graphs
from ..storage import AnyStore
from .layer_selection import LayerSelection
from .observed_keys import OBSERVED, observed


class StaleHandleError(HybridCacheError, RuntimeError):
    """The states that `update` returned were used after the cache had changed."""


class HandledAttention(Protocol):
    """Attention that handles stand for: it reads the tokens of a store where they are."""

    def __call__(
        self,
        query: torch.Tensor,
        store: AnyStore,
        group: int,
        mask: torch.Tensor | None,
        scale: float | None,
        selection: LayerSelection | None = None,
        are_causal: bool = False,
    ) -> torch.Tensor:
        """See `StoredAttention`."""

    def takes_prompts(self, store: AnyStore) -> bool:
        """Return whether queries may be causal."""

    def decline(self, what: str, num_tokens: int) -> None:
        """Note that an operation needs the states themselves, and which it is."""


class LayerView:
    """
    One layer as it was when its handles were made.

    Args:
        store: of the layer.
        attention: runs the kernel.
        selection: lets attention skip pages; `None` to read all.

    Attributes:
        shape: of the stored states.
    """

    def __init__(self, store: AnyStore, attention: HandledAttention, selection: LayerSelection | None = None):
        self.attention = attention
        self.selection = selection
        self.shape = store.shape
        self._store = store
        self._version = store.version
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None

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

    def states(self, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the real keys and values, which `what` reads, on the device of the model, brought once for both."""
        store = self.store
        if self._states is None:
            self.attention.decline(what, store.num_tokens)
            keys, values = store.read()
            self._states = (observed(keys, store.observe) if store.wants_queries else keys), values
        return self._states


class KVHandle(torch.Tensor):
    """
    All keys, or all values, of a layer in host memory, or a view that transformers' `repeat_kv` takes of them.

    Attributes:
        layer: layer that it stands for.
        role: 0 for keys, 1 for values.
        views: functions that make this view out of the real states.
    """

    layer: LayerView
    role: int
    _shape: torch.Size
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]

    @staticmethod
    def make(
        layer: LayerView, role: int, shape: torch.Size, views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    ) -> "KVHandle":
        states = layer.shape
        dtype = states.value_dtype if role else states.key_dtype
        handle = torch.Tensor._make_wrapper_subclass(KVHandle, shape, dtype=dtype, device=states.device)
        handle.layer, handle.role, handle._shape, handle.views = layer, role, shape, views
        return handle

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the states. Torch's own property would go through `__torch_function__`, several times a step."""
        return self._shape

    def states(self, what: str) -> torch.Tensor:
        """Return the real tensor, which `what` reads."""
        states = self.layer.states(what)[self.role]
        for view in self.views:
            states = view(states)
        return states

    def seen_as(self, shape: torch.Size, view: Callable[[torch.Tensor], torch.Tensor]) -> "KVHandle":
        """Return the handle of a view of this one; `view` makes it of a tensor, with this shape."""
        return KVHandle.make(self.layer, self.role, shape, (*self.views, view))

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
        elif func in _REPEATING and isinstance(args[0], KVHandle) and not kwargs:
            handle, *arguments = args
            shape = _REPEATING[func](handle, *arguments)
            if shape is not None:
                return handle.seen_as(shape, lambda states: func(states, *arguments))
        elif func in OBSERVED and cls._are_observed(args):
            args, kwargs = _with_states(func.__name__, args, kwargs)
            return func(*args, **kwargs)
        elif func in _NOT_DISPATCHED:
            args, kwargs = _with_states(func.__name__, args, kwargs)
        # The handle itself answers shape, type and device; operations that need data end in __torch_dispatch__.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @staticmethod
    def _are_observed(args: Sequence[object]) -> bool:
        """Return whether the store still needs queries, which attention to the real states must show to it."""
        return any(isinstance(each, KVHandle) and each.layer.store.wants_queries for each in args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _with_states(str(func.overloadpacket), args, kwargs or {})
        if func is torch.ops.aten.view.default:
            # A handle claims to be contiguous; streamed states are not.
            func = torch.ops.aten.reshape.default
        return func(*args, **kwargs)


def handles_of(
    store: AnyStore, attention: HandledAttention, selection: LayerSelection | None = None
) -> tuple[KVHandle, KVHandle]:
    """Make handles of all keys and all values of `store`, `[batch, num_kv_heads, tokens, head_dim]`."""
    layer, shape = LayerView(store, attention, selection), store.shape
    batch, num_kv_heads, num_tokens = shape.batch, shape.num_kv_heads, store.num_tokens
    return (
        KVHandle.make(layer, 0, torch.Size((batch, num_kv_heads, num_tokens, shape.key_dim))),
        KVHandle.make(layer, 1, torch.Size((batch, num_kv_heads, num_tokens, shape.value_dim))),
    )


def _with_states(what: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of an operation with the real states in the places of handles."""
    result: tuple[Any, Any] = tree_map_only(KVHandle, lambda handle: handle.states(what), (args, kwargs))
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
    """Compute `scaled_dot_product_attention` by the kernel; `None` for a call that it does not cover."""
    if not (isinstance(key, KVHandle) and isinstance(value, KVHandle)) or isinstance(query, KVHandle):
        return None
    layer, sizes, shape = key.layer, query.shape, key.shape
    if layer is not value.layer or len(sizes) != 4 or len(shape) != 4:
        return None
    store, states = layer.store, layer.shape
    batch, query_heads, length, query_dim = sizes
    kv_batch, heads, tokens, head_dim = shape
    fits = (
        (key.role, value.role) == (0, 1)
        and value.shape[:3] == shape[:3]
        and batch == kv_batch
        and query_dim == head_dim
        and query.dtype == states.key_dtype
        and query.device == states.device
        and (query_heads == heads or (enable_gqa and query_heads % heads == 0))
    )
    needs_more = dropout_p > 0 or (torch.is_grad_enabled() and query.requires_grad)
    if not fits or needs_more or not _covers(attn_mask, query, tokens):
        return None
    is_prompt = attn_mask is None and length == tokens
    if is_causal and not (is_prompt and layer.attention.takes_prompts(store)):
        return None
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    group = query_heads // states.num_kv_heads
    with as_written(query.device):
        return layer.attention(query, store, group, attn_mask, scale, layer.selection, is_causal)


def _covers(mask: torch.Tensor | None, query: torch.Tensor, tokens: int) -> bool:
    """Return whether the kernel takes `mask`: one value a token, shared by sequences, heads and queries or not."""
    if mask is None:
        return True
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    full = (*query.shape[:3], tokens)
    return (
        len(shape) == 4
        and shape[3] == tokens
        and all(size in (1, expected) for size, expected in zip(shape, full, strict=True))
        and (mask.dtype == torch.bool or mask.dtype.is_floating_point)
        and not isinstance(mask, KVHandle)
    )


def _is_there(handle: object, *target: Any, **options: Any) -> bool:
    """Return whether a handle that is moved stays on its device; models that share keys and values move handles."""
    device = target[0] if len(target) == 1 and not options else None
    return isinstance(handle, KVHandle) and isinstance(device, torch.device) and device == handle.device


def _new_axis(handle: KVHandle, index: Any) -> torch.Size | None:
    whole = slice(None)
    if handle.dim() != 4 or not isinstance(index, tuple) or any(isinstance(item, torch.Tensor) for item in index):
        return None
    wanted = torch.Size((*handle.shape[:2], 1, *handle.shape[2:]))
    return wanted if index == (whole, whole, None, whole, whole) else None


def _expanded(handle: KVHandle, *sizes: Any) -> torch.Size | None:
    wanted, shape = _as_size(sizes), handle.shape
    same = len(wanted) == len(shape) == 5 and wanted[:2] + wanted[3:] == shape[:2] + shape[3:]
    return wanted if same and shape[2] == 1 else None


def _flattened(handle: KVHandle, *sizes: Any) -> torch.Size | None:
    wanted, shape = _as_size(sizes), handle.shape
    same = len(shape) == 5 and wanted == (shape[0], shape[1] * shape[2], *shape[3:])
    return wanted if same else None


def _as_size(sizes: tuple[Any, ...]) -> torch.Size:
    return torch.Size(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes)


# Methods that torch refuses for a subclass before it asks the subclass.
_NOT_DISPATCHED = {torch.Tensor.tolist, torch.Tensor.numpy}

# The three operations of transformers' `repeat_kv`, and the shape each gives, or `None` for another use of it.
_REPEATING: dict[Any, Callable[..., torch.Size | None]] = {
    torch.Tensor.__getitem__: _new_axis,
    torch.Tensor.expand: _expanded,
    torch.Tensor.reshape: _flattened,
}
