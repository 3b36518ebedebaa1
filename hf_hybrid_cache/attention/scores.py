"""
Attention that a model writes out, operation by operation: scores that nobody computes until they meet the values.

A product of queries with a handle of keys gives `Scores`: a tensor in shape, type and device, without numbers, which
knows what attention it is. Operations that attention is made of give `Scores` again, and the product with the handle of
values is one call of attention over the store. Any other operation gets the numbers, computed as the model wrote them.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from ..errors import HybridCacheError
from ..graph_breaks import outside_of_graphs
from .queries import Queries, covers

# Computes numbers, and is told which operation reads them.
_Compute = Callable[[str], torch.Tensor]


class StaleHandleError(HybridCacheError, RuntimeError):
    """The states that `update` returned, or scores of them, were used after the cache or the queries had changed."""


class Written(NamedTuple):
    """
    Scores: `scale * queries @ keys.T`, or `cap * tanh` of that, plus a mask; or what attention makes of them.

    Attributes:
        queries: with the scale of the products, the cap, the mask and the sinks.
        form: "products" to which nothing was added, "scores", or "shifted" by the highest score of each query, which
            changes no weight; the "highest" score of each query; "weights", softmax of scores; or "numbers" of which
            nothing is known.
        has_sinks: the last column is that of the sinks, no token's.
    """

    queries: Queries
    form: str = "products"
    has_sinks: bool = False

    @property
    def are_scores(self) -> bool:
        """Whether they are the scores themselves."""
        return self.form in ("products", "scores", "shifted")

    def says_the_same(self, other: "Written") -> bool:
        """Return whether two of the same product went the same way."""
        return all(ours is theirs for ours, theirs in zip(self.queries, other.queries, strict=True))


class Product:
    """
    A product of queries and keys, of which scores are made.

    Args:
        attend: returns attention of queries if a tensor is the handle of the values, as a type; `None` otherwise.
    """

    def __init__(self, attend: Callable[[Queries, torch.Tensor, torch.dtype], torch.Tensor | None]):
        self.attend = attend
        self._scores: list[weakref.ref[Scores]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []

    def add(self, scores: "Scores") -> None:
        """Note scores that were made of the product."""
        self._scores.append(weakref.ref(scores))

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note the numbers of a tensor of which scores are to be made; return it."""
        if not tensor.is_inference():  # nobody counts what is written to it
            self._versions.append((tensor, tensor._version))
        return tensor

    def require_unchanged(self) -> None:
        """
        Check what scores are made of.

        Raises:
            StaleHandleError: queries, a mask or sinks were written to.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise StaleHandleError(
                "Queries, a mask or sinks were written to before the attention that a model made of them was computed. "
                "Write to a copy, or pass cpu_decode=False to the cache."
            )

    def compute(self, what: str) -> None:
        """Compute the numbers of all scores that somebody has, for `what`, which changes what they are made of."""
        for each in self._scores:
            scores = each()
            if scores is not None:
                scores.numbers(what)


class LazyTensor(torch.Tensor):
    """A tensor in shape, type and device, whose numbers an operation gets that needs them."""

    def numbers(self, what: str) -> torch.Tensor:
        """Return the real tensor, which `what` reads."""
        raise NotImplementedError

    def note_write(self, what: str) -> None:
        """Note that `what` writes to the numbers."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        what, kwargs = str(func.overloadpacket), kwargs or {}
        if func._schema.is_mutable:
            for each in (*args, *kwargs.values()):
                if isinstance(each, LazyTensor):
                    each.note_write(what)
        args, kwargs = tree_map_only(LazyTensor, lambda each: each.numbers(what), (args, kwargs))
        # It claims to be contiguous; streamed states are not.
        return (torch.ops.aten.reshape.default if func is torch.ops.aten.view.default else func)(*args, **kwargs)


class Scores(LazyTensor):
    """
    Scores that nobody has computed yet, or weights that are made of them.

    Attributes:
        written: what they are.
        product: that they are made of.
    """

    written: Written
    product: Product
    _compute: _Compute
    _numbers: torch.Tensor | None

    @staticmethod
    def make(
        written: Written, product: Product, shape: tuple[int, ...], dtype: torch.dtype, compute: _Compute
    ) -> "Scores":
        """Return scores of such a shape and type, whose numbers `compute` returns."""
        device = written.queries.states.device
        scores = torch.Tensor._make_wrapper_subclass(Scores, shape, dtype=dtype, device=device)
        scores.written, scores.product, scores._compute, scores._numbers = written, product, compute, None
        product.add(scores)
        return scores

    def numbers(self, what: str) -> torch.Tensor:
        if self._numbers is None:
            self.product.require_unchanged()
            self._numbers = self._compute(what)
        return self._numbers

    def note_write(self, what: str) -> None:
        self.product.compute(what)
        self.written = self.written._replace(form="numbers")

    @classmethod
    @outside_of_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _STEPS and kwargs.keys() <= _OPTIONS:
            result = _STEPS[func](partial(_computed, func, args, kwargs), *args, **kwargs)
            if result is not None:
                return result
        # The tensor itself answers shape, type and device; operations that need numbers end in __torch_dispatch__.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def scores_of(product: Product, queries: Queries, tokens: int, compute: _Compute) -> Scores:
    """Return the scores of `queries` and so many tokens, before anything is done to them."""
    query = product.watch(queries.states)
    return Scores.make(Written(queries), product, (*query.shape[:3], tokens), query.dtype, compute)


def _computed(func: Any, args: Any, kwargs: Any, what: str) -> Any:
    """Compute an operation with the numbers of scores, which `what` reads."""
    args, kwargs = tree_map_only(Scores, lambda scores: scores.numbers(what), (args, kwargs))
    return func(*args, **kwargs)


def _made(
    scores: Scores,
    step: _Compute,
    written: Written,
    dtype: torch.dtype | None = None,
    columns: int | None = None,
) -> Scores:
    """Return what a step makes of scores, which is `written`."""
    shape = (*scores.shape[:3], scores.shape[3] if columns is None else columns)
    return Scores.make(written, scores.product, shape, dtype or scores.dtype, step)


def _needs_gradients(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _multiplied(step: Any, first: Any, second: Any) -> Scores | None:
    """Scores times a number, or divided by one, unless something was added to them."""
    scores, number = (first, second) if isinstance(first, Scores) else (second, first)
    divides = step.args[0] in _DIVISIONS
    if scores.written.form != "products" or not isinstance(number, (int, float)) or number == 0:
        return None
    if divides and scores is second:
        return None
    queries, factor = scores.written.queries, 1 / number if divides else number
    assert queries.scale is not None
    cap = None if queries.cap is None else queries.cap * factor
    return _made(scores, step, Written(queries._replace(scale=queries.scale * factor, cap=cap)))


def _tanh(step: Any, scores: Scores) -> Scores | None:
    written = scores.written
    if written.form != "products" or written.queries.cap is not None:
        return None
    return _made(scores, step, Written(written.queries._replace(cap=1.0)))


def _added(step: Any, first: Any, second: Any) -> Scores | None:
    scores, mask = (first, second) if isinstance(first, Scores) else (second, first)
    written = scores.written
    if not written.are_scores or written.has_sinks or not isinstance(mask, torch.Tensor) or isinstance(mask, Scores):
        return None
    queries = written.queries
    if not mask.dtype.is_floating_point or not covers(mask, queries.states, scores.shape[3]) or _needs_gradients(mask):
        return None
    shaped = scores.product.watch(mask)[(None,) * (4 - mask.dim())]
    total = shaped if queries.mask is None else queries.mask + shaped
    form = "scores" if written.form == "products" else written.form
    result = torch.promote_types(scores.dtype, mask.dtype)
    return _made(scores, step, Written(queries._replace(mask=total), form), result)


def _joined(step: Any, tensors: Any, dim: int = 0) -> Scores | None:
    if len(tensors) != 2 or dim not in (-1, 3) or not isinstance(tensors[0], Scores):
        return None
    scores, sinks = tensors
    written = scores.written
    if written.form not in ("products", "scores") or written.has_sinks:
        return None
    is_column = isinstance(sinks, torch.Tensor) and tuple(sinks.shape) == (*scores.shape[:3], 1)
    if not is_column or isinstance(sinks, Scores) or _needs_gradients(sinks):
        return None
    joined = Written(written.queries._replace(sinks=scores.product.watch(sinks)), "scores", has_sinks=True)
    return _made(scores, step, joined, torch.promote_types(scores.dtype, sinks.dtype), scores.shape[3] + 1)


def _highest(step: Any, scores: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    written = scores.written
    if not written.are_scores or not isinstance(dim, int) or dim not in (-1, 3) or not keepdim:
        return None
    highest, places = (written._replace(form=form) for form in ("highest", "numbers"))
    if step.args[0] in (torch.Tensor.amax, torch.amax):
        return _made(scores, step, highest, columns=1)
    values = _made(scores, lambda what: step(what).values, highest, columns=1)
    indices = _made(scores, lambda what: step(what).indices, places, torch.int64, columns=1)
    return torch.return_types.max((values, indices))


def _without_highest(step: Any, scores: Any, highest: Any) -> Scores | None:
    """Scores minus the highest of them: weights do not depend on it."""
    if not (isinstance(scores, Scores) and isinstance(highest, Scores)):
        return None
    written, other = scores.written, highest.written
    if not written.are_scores or other.form != "highest":
        return None
    if scores.product is not highest.product or not written.says_the_same(other):
        return None
    return _made(scores, step, written._replace(form="shifted"))


def _softmax(
    step: Any, scores: Scores, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Scores | None:
    written = scores.written
    if not written.are_scores or dim not in (-1, 3) or isinstance(_stacklevel, torch.dtype):
        return None
    return _made(scores, step, written._replace(form="weights"), dtype)


def _as_type(step: Any, scores: Any, *arguments: Any, **options: Any) -> Scores | None:
    dtype = options.get("dtype") if options else arguments[0] if arguments else _TYPES.get(step.args[0])
    if not isinstance(scores, Scores) or scores.written.form == "numbers" or len(arguments) + len(options) > 1:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return _made(scores, step, scores.written, dtype)


def _dropped_out(
    step: Any, scores: Scores, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Scores | None:
    """Weights after dropout that is off."""
    return scores if p == 0 or not training else None


def _without_sinks(step: Any, scores: Scores, index: Any) -> Scores | None:
    written, whole = scores.written, slice(None)
    if written.form != "weights" or not written.has_sinks:
        return None
    if not isinstance(index, tuple) or not all(each is ... or isinstance(each, slice) for each in index):
        return None
    if index not in ((..., slice(None, -1)), (whole, whole, whole, slice(None, -1))):
        return None
    return _made(scores, step, written._replace(has_sinks=False), columns=scores.shape[3] - 1)


def _attended(step: Any, weights: Any, values: Any) -> torch.Tensor | None:
    """Attention: weights times the handle of values."""
    if not isinstance(weights, Scores) or isinstance(values, Scores):
        return None
    written = weights.written
    if written.form != "weights" or written.has_sinks:
        return None
    weights.product.require_unchanged()
    return weights.product.attend(written.queries, values, torch.promote_types(weights.dtype, values.dtype))


_TYPES = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}
_DIVISIONS = (torch.div, torch.Tensor.div, torch.Tensor.__truediv__)
# Arguments that the functions above take by name.
_OPTIONS = {"dim", "dtype", "inplace", "keepdim", "p", "training", "_stacklevel"}
# What attention is made of. Each function gets what computes the operation, and its arguments; it returns `None` for a
# use that it does not know.
_STEPS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__], _multiplied),
    **dict.fromkeys(_DIVISIONS, _multiplied),
    **dict.fromkeys([torch.tanh, torch.Tensor.tanh], _tanh),
    **dict.fromkeys([torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__], _added),
    **dict.fromkeys([torch.cat, torch.concat], _joined),
    **dict.fromkeys([torch.max, torch.Tensor.max, torch.amax, torch.Tensor.amax], _highest),
    **dict.fromkeys([torch.sub, torch.Tensor.sub, torch.Tensor.__sub__], _without_highest),
    **dict.fromkeys([functional.softmax, torch.softmax, torch.Tensor.softmax], _softmax),
    **dict.fromkeys([torch.Tensor.to, torch.Tensor.type, *_TYPES], _as_type),
    functional.dropout: _dropped_out,
    torch.Tensor.__getitem__: _without_sinks,
    **dict.fromkeys([torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__], _attended),
}
