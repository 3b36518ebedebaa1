"""A recorded step with its memory, and the layers of the cache that it is run with."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_unflatten

from ..cache import HybridCache, WholeSteps
from ..errors import HybridCacheError
from ..kernels import BFLOAT16, Attend, Call, Memory, Place, StepProgram
from ..storage import KVShape
from .recording import Array, MaskOf, PythonCall, Recording, StageValue, Step, mask_of
from .schedule import reads_of, writes_of
from .stages import Stages


class UnfitStepError(HybridCacheError, RuntimeError):
    """A step is not one that was recorded; the message says why."""


class StepPlan:
    """
    The step of a model for a number of sequences.

    Args:
        decoder: whose forward runs around the stages. It is not kept, and its modules are.
        names: of the children that are stages, or hold them.
        recording: of the stages.
        steps: those of the recording, in the order in which they run.
        rows: sequences.
    """

    def __init__(
        self, decoder: nn.Module, names: tuple[str, ...], recording: Recording, steps: Sequence[Step], rows: int
    ):
        self.rows, self._recording, self._all_steps = rows, recording, steps
        self._stages = Stages(decoder, names)
        self._wanted: dict[int, list[int]] = {}
        for stage, leaf in recording.inputs:
            self._wanted.setdefault(stage, []).append(leaf)
        self._attends = [step for step in steps if isinstance(step, Attend)]
        self._layers = sorted({step.layer for step in self._attends})
        self._calls_cache = any(isinstance(step, PythonCall) and HybridCache in step.leaves for step in steps)
        self._steps: WholeSteps | None = None
        self._in_kernels: tuple[int, ...] | None = None
        self._cache: Any = None
        self._values: dict[StageValue, Any] = {}
        self._masks: list[Any] = []

    def take(self, cache: HybridCache) -> str:
        """
        Prepare a step over a cache; return why it is not possible, or an empty string.

        Raises:
            IncompleteCacheError: something has ended a change of the cache half-way.
        """
        steps = self._steps
        if steps is None or not steps.are_of(cache):
            self._steps = None
            steps = WholeSteps(cache, self._layers, self._calls_cache)
            if steps.why_none:
                return steps.why_none
            if steps.indices != self._in_kernels:
                self._build(steps.indices)
            for shape, store in zip(self._shapes, steps.stores, strict=True):
                if store.shape != shape:
                    return f"the cache holds {store.shape}, the step is of {shape}"
            if steps.indices:
                steps.count_next()
                self._program.take(steps.blocks)
            self._steps = steps
        return ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache that was taken."""
        assert self._steps is not None
        return self._steps.num_tokens

    def run(self, cache: HybridCache, **given: Any) -> Any:
        """
        Run the step over the cache that was taken; return what the decoder returns.

        Args:
            cache: the same.
            given: further arguments of the decoder, without a mask.

        Raises:
            UnfitStepError: it is none that was recorded; nothing has changed.
        """
        self._cache, self._values, self._masks = cache, {}, []
        try:
            return self._stages.run(cache, self._call_stage, **given)
        finally:
            self._cache, self._values, self._masks = None, {}, []

    def _call_stage(self, stage: int, module: nn.Module, args: Any, options: Any) -> Any:
        """Note what a stage is given; the last one runs the step."""
        if stage in self._wanted:
            leaves = tree_leaves((args, options))
            self._values.update((StageValue(stage, leaf), leaves[leaf]) for leaf in self._wanted[stage])
        mask = mask_of(self._recording.masks[stage], args, options)
        if mask is not None and not any(mask is each for each in self._masks) and not _hides_nothing(mask):
            raise UnfitStepError("a mask hides tokens")
        self._masks.append(mask)
        others = self._recording.outputs[stage]
        states = self._run_program() if stage == len(self._recording.outputs) - 1 else args[0]
        return states if others is None else (states, *([None] * len(others)))

    def _run_program(self) -> torch.Tensor:
        steps = self._steps
        assert steps is not None
        inputs = [(view, self._fitting(view, source)) for source, view in self._inputs.items()]
        self._steps = None  # until it is whole
        steps.begin()
        for view, value in inputs:
            view.copy_(value)
        self._program.run([partial(call, self) for call in self._calls])
        steps.end(self._queries)
        self._steps = steps
        return self._result.clone()

    def _fitting(self, view: torch.Tensor, source: StageValue) -> torch.Tensor:
        """Return what a stage is given, if it is of the kind that was recorded."""
        value = self._values[source]
        fits = (
            value.dtype == view.dtype
            and value.device == view.device
            and value.shape[-view.dim() + 1 :] == view.shape[1:]
        )
        if value.dim() == view.dim():
            fits = fits and value.shape[0] in (1, self.rows)
        else:
            fits = fits and value.dim() < view.dim()
        if not fits:
            raise UnfitStepError(f"a layer is given {tuple(value.shape)} of {value.dtype} on {value.device}")
        return value

    @torch.inference_mode(False)
    def _build(self, in_kernels: tuple[int, ...]) -> None:
        """Make the program for caches of which some layers are attended to in kernels."""
        recording, rows = self._recording, self.rows
        self._in_kernels = in_kernels
        in_order = [step for step in self._attends if step.layer in in_kernels and step.keys is not None]
        assert recording.result is not None
        outside = {array.storage for array in recording.inputs.values()} | {recording.result.storage}
        outside |= {step.query.storage for step in self._attends if step.layer in in_kernels}
        # Storages of the caller: whole rows of bytes, aligned as vectors are.
        self._given = {
            key: torch.zeros(rows, -(-recording.scratch[key] // 64) * 64, dtype=torch.uint8)
            for key in outside
            if key in recording.scratch
        }
        given = {key: Memory(tensor.data_ptr(), tensor.stride(0)) for key, tensor in self._given.items()}
        given |= {key: Memory(each.untyped_storage().data_ptr(), 0) for key, each in recording.constants.items()}
        scratch = {key: size for key, size in recording.scratch.items() if key not in self._given}
        by_python = [
            step
            for step in self._all_steps
            if isinstance(step, PythonCall) or (isinstance(step, Attend) and step.layer not in in_kernels)
        ]
        operations: list[Any] = [
            Call(tuple({key for key in reads_of(step) | writes_of(step) if key in scratch}))
            if any(step is each for each in by_python)
            else step._replace(layer=in_kernels.index(step.layer))
            if isinstance(step, Attend)
            else step
            for step in self._all_steps
        ]
        self._program = StepProgram(operations, rows, scratch, given)
        self._calls = [
            partial(StepPlan._attend, step=step) if isinstance(step, Attend) else self._caller(step)
            for step in by_python
        ]
        self._inputs = {source: self._view(array) for source, array in recording.inputs.items()}
        self._result = self._view(recording.result)
        self._queries = [
            (step.layer, self._states(step.query, step.num_kv_heads * step.group, step.key_dim))
            for step in self._attends
            if step.layer in in_kernels
        ]
        dtypes = [torch.bfloat16 if step.query.kind == BFLOAT16 else torch.float32 for step in in_order]
        self._shapes = [
            KVShape(rows, step.num_kv_heads, step.key_dim, step.value_dim, dtype, dtype, torch.device("cpu"))
            for step, dtype in sorted(zip(in_order, dtypes, strict=True), key=lambda pair: pair[0].layer)
        ]

    def _view(self, array: Array) -> torch.Tensor:
        """An array of all rows: its first dimension is theirs, where that has one number for each row."""
        dtype = torch.float32 if array.dtype == torch.bool else array.dtype
        memory, item = self._program.memory_of(array.storage), dtype.itemsize
        num_bytes = (self.rows - 1) * memory.row_bytes + self._recording.scratch[array.storage]
        numbers = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(memory.address), dtype=torch.uint8)
        has_rows = bool(array.shape) and array.shape[0] == 1
        shape, strides = (part[1:] if has_rows else part for part in (array.shape, array.strides))
        numbers = numbers[: num_bytes // item * item].view(dtype)
        return numbers.as_strided((self.rows, *shape), (memory.row_bytes // item, *strides), array.offset)

    def _states(self, place: Place, heads: int, dim: int) -> torch.Tensor:
        """Queries, keys, values or outputs of all rows, `[rows, heads, 1, dim]`."""
        dtype = torch.bfloat16 if place.kind == BFLOAT16 else torch.float32
        heads_apart, numbers_apart = place.strides
        return self._view(
            Array(place.storage, dtype, place.offset, (1, heads, 1, dim), (0, heads_apart, 0, numbers_apart))
        )

    def _attend(self, step: Attend) -> None:
        """Attention to a layer of transformers' own."""
        heads = step.num_kv_heads * step.group
        query = self._states(step.query, heads, step.key_dim)
        assert step.keys is not None
        assert step.values is not None
        keys = self._states(step.keys, step.num_kv_heads, step.key_dim)
        values = self._states(step.values, step.num_kv_heads, step.value_dim)
        keys, values = self._cache.update(keys.clone(), values.clone(), step.layer)
        sinks = None
        if step.sinks is not None:
            constant = self._recording.constants[step.sinks.storage]
            sinks = constant.as_strided((heads,), step.sinks.strides, step.sinks.offset)
        out = _attention(query, keys, values, step.scale, step.cap, sinks)
        self._states(step.out, heads, step.value_dim).copy_(out)

    def _caller(self, call: PythonCall) -> Callable[["StepPlan"], None]:
        """A function that makes a call with what is in memory."""
        together = [slice(None)] if call.of_all_rows else range(self.rows)
        views = [[[self._part(each, rows) for each in part] for part in (call.leaves, call.outs)] for rows in together]
        is_truth = [isinstance(each, Array) and each.dtype == torch.bool for each in call.leaves]
        truths = [index for index, is_one in enumerate(is_truth) if is_one]

        def run(plan: "StepPlan") -> None:  # a plan that refers to itself would keep the weights alive
            for leaves, outs in views:
                given = [plan._current(each) for each in leaves]
                for index in truths:
                    given[index] = leaves[index].bool()
                args, options = tree_unflatten(given, call.spec)
                result = call.function(*args, **options)
                if call.writes:
                    for index in truths:
                        leaves[index].copy_(given[index])
                for out, new in zip(outs, tree_leaves(result), strict=True):
                    if out is not None:
                        out.copy_(new)

        return run

    def _part(self, leaf: Any, rows: Any) -> Any:
        """An array of all rows, or that of one in the shape that was recorded; anything else as it is."""
        if not isinstance(leaf, Array):
            return leaf
        view = self._view(leaf)[rows]
        return view if isinstance(rows, slice) else view.as_strided(leaf.shape, leaf.strides)

    def _current(self, leaf: Any) -> Any:
        if leaf is HybridCache:
            return self._cache
        return self._masks[leaf.stage] if isinstance(leaf, MaskOf) else leaf


def _attention(
    query: torch.Tensor, keys: Any, values: Any, scale: float, cap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one token of each sequence."""
    if cap is None and sinks is None:
        return scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    scores = query @ keys.mT * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : keys.shape[2]] @ values


def _hides_nothing(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and bool(mask.all() if mask.dtype == torch.bool else not mask.any())
