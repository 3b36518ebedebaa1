"""
Recording what the stages of a decoder compute in a step, as a program on rows.

A stage is a layer, or what follows the layers. It runs under two modes of torch. One sees functions before they are
taken apart: products with weights, and attention to handles. The other sees all other operations as the dispatcher
does. What is recorded are storages: an operand is a piece of the memory of the tensor that was computed, so views need
no record, and nothing depends on the number of rows.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from ..attention.handles import KVHandle, LayerView
from ..attention.queries import Queries
from ..attention.scores import LazyTensor
from ..cache import HybridCache
from ..errors import HybridCacheError
from ..kernels import BFLOAT16, FLOAT32, Attend, Instruction, Multiply, Place, ProductOf, Products
from ..weights import QuantizedWeight
from .translation import FORMULAS, Operand, translate

# Truth is a number in a program.
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.bool: FLOAT32}
_TRUTHS = {"copy", "eq", "ne", "lt", "le", "gt", "ge", "mul", "maximum", "where"}
# In the place of a storage: of a mask, and of what is not numbers in memory.
_MASK, _NOWHERE = -1, -2
# The name of the argument that is a mask.
MASK = "attention_mask"


class Array(NamedTuple):
    """A tensor of each row: a piece of a storage, in numbers. Those of `torch.bool` are stored as float32."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class StageValue(NamedTuple):
    """An argument of a stage: the leaf `leaf` of those of stage `stage`."""

    stage: int
    leaf: int


class MaskOf(NamedTuple):
    """The mask of a stage."""

    stage: int


class PythonCall(NamedTuple):
    """
    A function that Python calls between kernels.

    Attributes:
        function: called with tensors in the places of arrays, the cache in that of `HybridCache`, which stands for it,
            and the mask of a stage in that of `MaskOf`.
        leaves: of its arguments, positional ones and those by name.
        spec: how they are arranged.
        outs: what becomes of the leaves of its result; `None` for what is not a new tensor.
        of_all_rows: it takes all rows at once, along the first dimension; others are called for one row after another.
        writes: its arguments, too.
    """

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    outs: tuple[Array | None, ...]
    of_all_rows: bool
    writes: bool


Step = Instruction | Multiply | Attend | PythonCall


class UnrecordableError(HybridCacheError, RuntimeError):
    """A step is not one of rows; the message says why."""


class OpaqueError(HybridCacheError, RuntimeError):
    """Something happens in a module that only Python can do; its kind is one of those that Python calls now."""


@dataclass
class Recording:
    """
    A step as a program on rows.

    Attributes:
        steps: in their order. Layers of attention are those of the cache.
        scratch: bytes of a row's storages.
        constants: tensors whose storages all rows share, by the storages.
        inputs: what is copied to arrays before the step.
        result: what the last stage returns.
        masks: where each stage has its mask among its arguments; `None` for by its name.
        outputs: what each stage returns, where that is a tuple: without its first element.
        weights: of products, kept alive.
    """

    steps: list[Step] = field(default_factory=list)
    scratch: dict[int, int] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[StageValue, Array] = field(default_factory=dict)
    result: Array | None = None
    masks: list[int | None] = field(default_factory=list)
    outputs: list[tuple[Any, ...] | None] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)


class Recorder(TorchFunctionMode):
    """
    Records stages one after the other, as they are called with one token of one sequence.

    It sees the functions of torch that they call, and `_Operations` those that the dispatcher sees.

    Args:
        cache: of which all layers of attention keep all tokens. What `update` is given there is noted.
        opaque: kinds of modules that are called from Python; more of them are added when they are found.

    Attributes:
        recording: what was recorded.
        cache: the cache.
    """

    def __init__(self, cache: HybridCache, opaque: set[type]):
        super().__init__()
        self.recording, self.cache, self._opaque = Recording(), cache, opaque
        self._keys: dict[int, int] = {}  # of storages, by their addresses
        self._alive: list[Any] = []  # so that nothing else comes to their addresses
        self._masks: dict[int, MaskOf] = {}  # by the addresses of storages
        self._given: set[int] = set()  # storages that stages are given from outside
        self._modules: list[nn.Module] = []  # that are being called
        self._views: dict[int, LayerView] = {}  # of the handles of layers
        self._new_states: dict[int, tuple[Array, Array]] = {}
        self._returned: Any = None
        self._paused = 0
        update = cache.update
        cache.update = partial(self._update, update)  # type: ignore[method-assign]
        for name in _ASKED:
            setattr(cache, name, partial(self._refuse_questions, name, getattr(cache, name)))

    def call(self, stage: int, module: nn.Module, args: Any, options: Any) -> Any:
        """
        Call and record a stage.

        Raises:
            UnrecordableError: what it does is not a step of rows.
        """
        if stage and (not args or args[0] is not self._returned):
            raise UnrecordableError("it computes between its layers")
        self._take_arguments(stage, module, args, options)
        tracked = self._tracked(module)
        try:
            with self, _Operations(self):
                result = tracked(*args, **options)
        finally:
            for each in tracked.modules():  # which hold themselves by it
                vars(each).pop("forward", None)
        self._returned = result[0] if isinstance(result, tuple) else result
        if not isinstance(self._returned, torch.Tensor):
            raise UnrecordableError(f"{type(module).__name__} returns {type(self._returned).__name__}")
        self.recording.outputs.append(result[1:] if isinstance(result, tuple) else None)
        self.recording.result = self._array(self._returned)
        return result

    def close(self) -> None:
        """Let go of all that was needed while recording."""
        self._alive.clear()
        self._views.clear()
        for name in ("update", *_ASKED):
            vars(self.cache).pop(name, None)

    def _take_arguments(self, stage: int, module: nn.Module, args: Any, options: Any) -> None:
        """Note the tensors that a stage is given from outside."""
        at_mask = _position(module, MASK) if MASK not in options else None
        self.recording.masks.append(at_mask)
        mask = mask_of(at_mask, args, options)
        for leaf, value in enumerate(tree_leaves((args, options))):
            if not _has_memory(value):
                continue
            at, source = value.untyped_storage().data_ptr(), StageValue(stage, leaf)
            if value is mask:
                self._masks.setdefault(at, MaskOf(stage))
                self._keys.setdefault(at, _MASK)
                self._alive.append(value)
                continue
            if at not in self._keys:
                self._given.add(self._new(value))
            array = self._array(value)
            if array.storage in self._given and array not in self.recording.inputs.values():
                self.recording.inputs[source] = array

    def _tracked(self, module: Any) -> Any:
        """A copy of a module that says when it is called, and so do the modules in it."""
        tracked = copy.copy(module)
        children = {name: None if child is None else self._tracked(child) for name, child in module._modules.items()}
        vars(tracked).update(_modules=children, forward=partial(self._enter, module, tracked))
        return tracked

    def _enter(self, module: nn.Module, tracked: Any, *args: Any, **options: Any) -> Any:
        if type(module) in self._opaque:
            return self._call_opaque(module, args, options)
        self._modules.append(module)
        forward: Any = type(module).forward
        result = forward(tracked, *args, **options)
        self._modules.pop()
        return result

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; record it if it is a product with a weight."""
        options = kwargs or {}
        if self._paused:
            return function(*args, **options)
        if function in _READERS:
            raise self._opaque_error(getattr(function, "__name__", str(function)))
        if (arguments := _PRODUCTS.get(function)) is not None:
            product = arguments(*args, **options)
            if product is not None and self._is_product(*product):
                return self._multiply(function, args, options, *product)
            if any(isinstance(each, QuantizedWeight) for each in tree_leaves((args, options))):
                with self.paused():
                    result = function(*args, **options)
                self._note_call(function, args, options, result)
                return result
        return function(*args, **options)

    def operation(self, function: Any, args: Any, options: Any) -> Any:
        """Call and record an operation as the dispatcher sees it."""
        if self._paused:
            return function(*args, **options)
        name = function._schema.name.partition("::")[2]
        given = [each for each in tree_leaves((args, options)) if isinstance(each, torch.Tensor)]
        if any(isinstance(each, LazyTensor) for each in given):
            raise self._opaque_error(f"{name} of keys and values")
        if torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags:
            raise self._opaque_error(name)
        sources = [self._array(each) for each in given]
        if any(each.storage == _MASK for each in sources):
            return self._of_mask(function, args, options)
        if name in FORMULAS and any(each.dtype in _KINDS for each in given):
            with _Operations(self):
                return FORMULAS[name](*args, **options)
        result = function(*args, **options)
        outs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        writes = function._schema.is_mutable
        if not writes and all(self._is_known(each) for each in outs):
            return result  # views
        for each in outs:
            self._array(each, is_new=True)
        written = self._written(function, args, options) if writes else outs
        if any(self._array(each).storage in self.recording.constants for each in written):
            raise self._opaque_error(f"{name} to what is kept between steps")
        if not self._translated(name.removesuffix("_") if writes else name, outs, args, options):
            self._note_call(function, args, options, result, writes=writes)
        return result

    def write(self, name: str, out: torch.Tensor, *operands: Operand, is_reduction: bool = False) -> bool:
        """Write an instruction, see `translate`."""
        if out.dtype == torch.bool:
            if name == "copy" and isinstance(operands[0], torch.Tensor) and operands[0].dtype != torch.bool:
                name, operands = "ne", (*operands, 0.0)
            if name not in _TRUTHS:
                return False
        if any(each.dtype not in _KINDS for each in (out, *operands) if isinstance(each, torch.Tensor)):
            return False
        shape = tuple(operands[0].shape if is_reduction and isinstance(operands[0], torch.Tensor) else out.shape)
        places = [self._place(each, shape) if isinstance(each, torch.Tensor) else float(each) for each in operands]
        of_out = self._place(out)
        self.recording.steps.append(Instruction(name, shape or (1,), of_out, tuple(places)))
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _translated(self, name: str, outs: Sequence[torch.Tensor], args: Any, options: Any) -> bool:
        before, steps = len(self.recording.steps), self.recording.steps
        options = {key: value for key, value in options.items() if key not in _NOT_COMPUTED}
        if translate(self.write, name, outs, args, options):
            return True
        del steps[before:]
        return False

    def _of_mask(self, function: Any, args: Any, options: Any) -> torch.Tensor:
        """A view of a mask, which says the same."""
        result = function(*args, **options)
        if not _has_memory(result) or not self._is_known(result):
            raise UnrecordableError(f"{function._schema.name} computes with the mask")
        assert isinstance(result, torch.Tensor)
        return result

    def _new(self, tensor: torch.Tensor) -> int:
        """The key of a storage that each row has."""
        storage = tensor.untyped_storage()
        key = self._keys[storage.data_ptr()] = len(self._keys)
        self.recording.scratch[key] = storage.nbytes() * (4 if tensor.dtype == torch.bool else 1)
        self._alive.append(tensor)
        return key

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in self._keys

    def _array(self, tensor: torch.Tensor, is_new: bool = False) -> Array:
        """A tensor as an array of storages; one that nobody has made while recording is a constant."""
        if not _has_memory(tensor):
            return Array(_NOWHERE, tensor.dtype, 0, tuple(tensor.shape), tuple([0] * tensor.dim()))
        at = tensor.untyped_storage().data_ptr()
        if at not in self._keys:
            key = self._new(tensor)
            if not is_new:
                del self.recording.scratch[key]
                self.recording.constants[key] = tensor
        return Array(self._keys[at], tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def _written(self, function: Any, args: Any, options: Any) -> list[torch.Tensor]:
        """The arguments that an operation writes to."""
        named = zip(function._schema.arguments, args, strict=False)
        given = {argument.name: value for argument, value in named} | options
        writes = [given.get(argument.name) for argument in function._schema.arguments if argument.is_write]
        return [each for each in tree_leaves(writes) if isinstance(each, torch.Tensor)]

    def _note_call(
        self, function: Any, args: Any, options: Any, result: Any, writes: bool = False, of_all_rows: bool = False
    ) -> None:
        leaves, spec = tree_flatten((args, options))
        taken = [self._taken(each) for each in leaves]
        outs = []
        for each in tree_leaves(result):
            is_new = isinstance(each, torch.Tensor) and (not self._is_known(each) or not writes)
            outs.append(self._array(each, is_new=True) if is_new and each.numel() else None)
        arrays = [each for each in (*taken, outs[0]) if isinstance(each, Array)]
        if of_all_rows and any(each.shape[:1] != (1,) for each in arrays):
            raise self._opaque_error(f"what {type(function).__name__} takes or gives")
        self.recording.steps.append(PythonCall(function, tuple(taken), spec, tuple(outs), of_all_rows, writes))

    def _taken(self, leaf: Any) -> Any:
        """A leaf of arguments as a call has it."""
        if leaf is self.cache:
            return HybridCache
        if not _has_memory(leaf):
            return leaf
        array = self._array(leaf)
        if array.storage == _MASK:
            return self._masks[leaf.untyped_storage().data_ptr()]
        return leaf if array.storage in self.recording.constants else array

    def _call_opaque(self, module: nn.Module, args: Any, options: Any) -> Any:
        """Call a module from Python, with all rows."""
        with self.paused():
            result = module(*args, **options)
        known, given = tree_leaves(result), {id(each) for each in tree_leaves((args, options))}
        if any(not (each is None or _has_memory(each)) or id(each) in given for each in known if each is not None):
            raise self._opaque_error(f"what {type(module).__name__} returns")
        self._note_call(module, args, options, result, of_all_rows=True)
        return result

    def _opaque_error(self, what: str) -> Exception:
        """Make the module that is being called one that Python calls."""
        if len(self._modules) < 2:
            return UnrecordableError(f"{what} is not of rows")
        self._opaque.add(type(self._modules[-1]))
        return OpaqueError(what)

    def _update(
        self, update: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **options: Any
    ) -> Any:
        """`update` of the cache, whose handles stand for a layer."""
        if self._paused:
            return update(keys, values, layer, *args, **options)
        with self.paused():
            handles = update(keys, values, layer, *args, **options)
        if not all(isinstance(each, KVHandle) for each in handles):
            raise self._opaque_error(f"update of layer {layer}")
        view = handles[0].layer
        self._alive.append(handles)
        self._new_states[layer] = self._array(keys), self._array(values)
        self._views[layer], view.states, view.attend = view, self._refuse_states, partial(self._attend, layer)
        return handles

    def _refuse_questions(self, name: str, function: Any, *args: Any, **options: Any) -> Any:
        if self._modules and not self._paused:
            raise self._opaque_error(f"{name} of the cache")
        return function(*args, **options)

    def _refuse_states(self, what: str) -> Any:
        raise self._opaque_error(f"{what} of keys and values")

    def _is_product(self, tokens: Any, weight: Any, bias: Any, is_transposed: bool) -> bool:
        """Whether kernels have a product: of one token, with a whole matrix."""
        rows, columns = reversed(weight.shape) if is_transposed else weight.shape
        if isinstance(weight, QuantizedWeight):
            fits = not weight.is_stacked and weight.is_transposed == is_transposed
        else:
            fits = _has_memory(weight) and self._is_constant(weight) and weight.dtype == tokens.dtype
            fits = fits and (weight.mT if is_transposed else weight).is_contiguous()
        if bias is not None:
            fits = fits and _has_memory(bias) and self._is_constant(bias) and bias.shape == (rows,)
            fits = fits and bias.is_contiguous() and bias.dtype == tokens.dtype
        return (
            fits
            and tokens.dtype in (torch.float32, torch.bfloat16)
            and tokens.shape[-1:] == (columns,)
            and (tokens.numel() == columns or tokens.is_contiguous())
            and tokens.stride(-1) == 1
            and 1 <= tokens.numel() // columns <= _MOST_TOKENS
        )

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return self._array(tensor).storage in self.recording.constants

    def _multiply(
        self, function: Any, args: Any, options: Any, tokens: torch.Tensor, weight: Any, bias: Any, is_transposed: bool
    ) -> torch.Tensor:
        with self.paused():
            out: torch.Tensor = function(*args, **options)
            rows, columns = reversed(weight.shape) if is_transposed else weight.shape
            if isinstance(weight, QuantizedWeight):
                products, which = weight.matrices.products, weight.which or 0
            else:
                is_bfloat16 = weight.dtype == torch.bfloat16
                products, which = Products.of_numbers(weight.data_ptr(), 1, rows, columns, is_bfloat16), 0
            self.recording.weights.append(weight)
            self._array(out, is_new=True)
            of_bias = None if bias is None else self._place(bias)
            flat = tokens.as_strided((tokens.numel() // columns, columns), (columns, 1))
            together = [
                ProductOf(products, which, self._place(each), self._place(of_out), of_bias)
                for each, of_out in zip(flat, out.view(-1, rows), strict=True)
            ]
        self.recording.steps.append(Multiply(tuple(together)))
        return out

    def _place(self, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> Place:
        """A tensor, repeated to a shape, as instructions have it."""
        array = self._array(tensor if shape is None else tensor.expand(shape))
        return Place(array.storage, _KINDS[array.dtype], array.offset, array.strides or (0,))

    def _attend(self, layer: int, queries: Queries, **options: Any) -> torch.Tensor:
        """Attention to the handles of a layer, however a model writes it."""
        view = self._views[layer]
        shape = view.shape
        if self._paused:
            return LayerView.attend(view, queries, **options)
        query, _, scale, mask, _, cap, sinks = queries
        if mask is not None and (not _has_memory(mask) or mask.untyped_storage().data_ptr() not in self._masks):
            raise UnrecordableError("its attention adds numbers to the scores, or hides tokens")
        # Of one token; beside a mask transformers gives the heads of a group as if they were tokens.
        _, groups, members, key_dim = query.shape
        heads, is_packed = groups * members, members > 1
        with self.paused():
            out = LayerView.attend(view, queries, **options)
            self._array(out, is_new=True)
            plain = query.contiguous() if is_packed or query.stride(3) != 1 else query
            fits = out.dtype == query.dtype and out.stride(3) == 1 and not is_packed
            attended = out if fits else torch.empty(out.shape, dtype=query.dtype)
            for each in (plain, attended):
                self._array(each, is_new=True)
            if plain is not query:
                self.write("copy", plain, query)
            states = self._new_states.pop(layer, None)
            keys, values = (None, None) if states is None else map(_of_heads, states)
            self.recording.steps.append(
                Attend(
                    layer,
                    _of_heads(self._array(plain.view(1, heads, 1, key_dim))),
                    keys,
                    values,
                    _of_heads(self._array(attended.view(1, heads, 1, shape.value_dim))),
                    shape.num_kv_heads,
                    heads // shape.num_kv_heads,
                    key_dim,
                    shape.value_dim,
                    key_dim**-0.5 if scale is None else scale,
                    cap,
                    None if sinks is None else self._place(sinks[0, :, 0, 0]),
                    len(self.recording.masks) - 1,
                )
            )
            if attended is not out:
                self.write("copy", out, attended)
        return out


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operation(func, args, kwargs or {})


def _has_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, (LazyTensor, QuantizedWeight))


def _position(module: nn.Module, name: str) -> int | None:
    """The place of an argument of a module's forward."""
    names = [*inspect.signature(type(module).forward).parameters][1:]
    return names.index(name) if name in names else None


def mask_of(position: int | None, args: Any, options: Any) -> Any:
    """The mask among the arguments of a stage; `None` if there is none."""
    return options.get(MASK) if position is None or position >= len(args) else args[position]


def _of_heads(array: Array) -> Place:
    """Queries, keys, values or outputs, `[1, heads, 1, head_dim]`, as `[heads, head_dim]`."""
    return Place(array.storage, _KINDS[array.dtype], array.offset, (array.strides[1], array.strides[3]))


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return input, weight, bias, False


def _times(input: Any, mat2: Any = None, other: Any = None) -> Any:
    weight = other if mat2 is None else mat2
    is_lazy = isinstance(input, LazyTensor) or isinstance(weight, LazyTensor)
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    return (input, weight, None, True) if is_matrix and not is_lazy else None


def _plus(input: Any, mat1: Any, mat2: Any, **options: Any) -> Any:
    return (mat1, mat2, input, True) if not options else None


# Tokens of a row that one weight is multiplied with.
_MOST_TOKENS = 16
_PRODUCTS: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm), _times),
    torch.addmm: _plus,
}
# Methods of a cache whose answers are others in each step.
_ASKED = ("get_seq_length", "get_mask_sizes", "get_conv_state", "update_conv_state", "update_recurrent_state")
# What the dispatcher does not see: numbers that go into Python, or into kernels.
_READERS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.data_ptr,
}
# Options that say where and how a result lies, as its tensor does.
_NOT_COMPUTED = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "implicit", "out"}
