"""A recorded step with its memory, and the layers of the cache that it is run with."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from ..attention.queries import mask_arrays, seen_ranges, simplified
from ..cache import HybridCache, WholeSteps, border_of_angles
from ..cache_argument import CACHE_ARGUMENT
from ..errors import HybridCacheError
from ..kernels import BFLOAT16, Attend, Call, Memory, Seen, Sequences, StepProgram
from ..scalars import MOST_ROWS
from ..storage import KVShape
from .recording import Array, MaskOf, PythonCall, Recording, StageValue, Step, mask_of
from .schedule import reads_of, writes_of
from .stages import Stages

_OF_PLAIN_ROWS = ("input_ids", "position_ids")


class UnfitStepError(HybridCacheError, RuntimeError):
    """A step is not one that was recorded; the message says why."""


@dataclass
class _Pass:
    """A pass over one cache: what its stages are given, values and the mask of each, and the last one's result."""

    cache: HybridCache
    rows: slice
    batch: int
    length: int
    values: dict[StageValue, Any] = field(default_factory=dict)
    masks: list[Any] = field(default_factory=list)
    states: torch.Tensor | None = None


class StepPlan:
    """
    The step of a model for some tokens of each sequence of one or several caches, up to `MOST_ROWS` in all.

    Args:
        decoder: whose forward runs around the stages. It is not kept, and its modules are.
        names: of the children that are stages, or hold them.
        recording: of the stages.
        steps: those of the recording, in the order in which they run.
        why_plain: see `RecordedStep`.
        joins: likewise.

    Attributes:
        sizes: of each cache of the step that was taken the number of sequences, and tokens of each.
        border: the position from which on tokens of several caches are not tried in one pass.
    """

    def __init__(
        self,
        decoder: nn.Module,
        names: tuple[str, ...],
        recording: Recording,
        steps: Sequence[Step],
        why_plain: str = "",
        joins: bool = False,
    ):
        self.sizes: list[tuple[int, int]] = []
        self._recording, self._all_steps = recording, steps
        self._stages = Stages(decoder, names)
        self._wanted: dict[int, list[int]] = {}
        for stage, leaf in recording.inputs:
            self._wanted.setdefault(stage, []).append(leaf)
        self._attends = [step for step in steps if isinstance(step, Attend)]
        self._layers = sorted({step.layer for step in self._attends})
        self._calls_cache = any(isinstance(step, PythonCall) and HybridCache in step.leaves for step in steps)
        self._gives_masks = any(
            isinstance(leaf, MaskOf) for step in steps if isinstance(step, PythonCall) for leaf in step.leaves
        )
        self._why_plain, self._joins, self.border = why_plain, joins, border_of_angles(decoder.config)
        self._steps: list[WholeSteps] = []
        self._alike: list[int] = []
        self._passes: list[_Pass] = []
        self._build()

    def take(self, caches: Sequence[HybridCache], sizes: Sequence[tuple[int, int]]) -> str:
        """
        Prepare a step over some caches; return why it is not possible, or an empty string.

        `sizes` says for how many tokens it is, at least one of each: others follow once a block of a cache is full.

        Args:
            caches: their tokens.
            sizes: of each the number of sequences, and tokens of each that are wanted.

        Raises:
            IncompleteCacheError: something has ended a change of the cache half-way.
        """
        if self._why_plain and (len(caches) > 1 or sizes[0][1] > 1):
            return self._why_plain
        before, self._steps = self._steps, []
        steps: list[WholeSteps] = []
        for cache, (batch, _) in zip(caches, sizes, strict=True):
            held = (each for each, (number, _) in zip(before, self.sizes, strict=False) if number == batch)
            of_cache = next((each for each in held if each.are_of(cache)), None)
            if of_cache is None:
                of_cache = WholeSteps(cache, self._layers, self._calls_cache)
                if why_not := of_cache.why_none or self._why_other(of_cache, batch, len(caches) > 1):
                    return why_not
            steps.append(of_cache)
        sizes = [(batch, min(length, each.num_left)) for each, (batch, length) in zip(steps, sizes, strict=True)]
        if steps != before or sizes != self.sizes:
            self.sizes = []  # until it is whole
            for each, (_, length) in zip(steps, sizes, strict=True):
                each.count_next(length)
            if steps != before:
                self._alike = [0, *(later.num_alike(earlier) for earlier, later in pairwise(steps))]
            each_size = zip(steps, sizes, self._alike, strict=True)
            self._program.take([Sequences(each.blocks, *size, each.prefixes, alike) for each, size, alike in each_size])
            self.sizes = sizes
        self._steps = steps
        return ""

    def _why_other(self, steps: WholeSteps, batch: int, are_several: bool) -> str:
        """Return why the step is not one over what a cache holds, or an empty string."""
        if are_several and self._gives_masks:
            return "a part of the step that Python calls takes the mask of one pass"
        for shape, store in zip(self._shapes, steps.stores, strict=True):
            if store.shape != shape._replace(batch=batch):
                return f"the cache holds {store.shape}, the step is of {shape._replace(batch=batch)}"
        return ""

    def run(self, given: Sequence[tuple[HybridCache, Mapping[str, Any]]]) -> list[Any]:
        """
        Run the step over the caches that were taken; return what the decoder returns for each.

        Args:
            given: the same caches, and further arguments of the decoder for each.

        Raises:
            UnfitStepError: it is none that was recorded; nothing has changed.
        """
        outs, first = [], 0
        try:
            if self._joins and self._are_plain(given):
                furthest = max(int(of_pass["position_ids"]) for _, of_pass in given)
                if furthest < self.border:
                    try:
                        return self._run_joined(given)
                    except UnfitStepError:
                        # Such as a mask, which a layer with a window has from some position on.
                        self.border, self._passes = furthest, []
            for (cache, of_pass), (batch, length) in zip(given, self.sizes, strict=True):
                rows = slice(first, first := first + batch * length)
                self._passes.append(_Pass(cache, rows, batch, length))
                outs.append(self._stages.run(cache, self._call_stage, **of_pass))
                # The states of all but the last are not there yet.
                if len(outs) < len(given) and outs[-1][0] is not self._passes[-1].states:
                    raise UnfitStepError("the decoder computes after its last layer")
            return outs
        finally:
            self._passes = []

    def _are_plain(self, given: Sequence[tuple[HybridCache, Mapping[str, Any]]]) -> bool:
        """Whether several caches have a token each, with its position and nothing else."""
        is_one_each = len(given) > 1 and {*self.sizes} == {(1, 1)}
        return is_one_each and all(
            of_pass.keys() == set(_OF_PLAIN_ROWS) and of_pass["position_ids"].shape == (1, 1) for _, of_pass in given
        )

    def _run_joined(self, given: Sequence[tuple[HybridCache, Mapping[str, Any]]]) -> list[Any]:
        """Run the step with one pass around the stages, of a token of each cache and its position."""
        tokens, positions = (torch.cat([of_pass[name] for _, of_pass in given]) for name in _OF_PLAIN_ROWS)
        longest = max((cache for cache, _ in given), key=HybridCache.get_seq_length)
        self._passes.append(_Pass(longest, slice(0, len(given)), len(given), 1))
        out = self._stages.run(longest, self._call_stage, input_ids=tokens, position_ids=positions)
        rows = zip(out[0].split(1), given, strict=True)
        return [type(out)(last_hidden_state=row, **{CACHE_ARGUMENT: cache}) for row, (cache, _) in rows]

    def _call_stage(self, stage: int, module: nn.Module, args: Any, options: Any) -> Any:
        """Note what a stage is given; the last one of the last pass runs the step."""
        own = self._passes[-1]
        if stage in self._wanted:
            leaves = tree_leaves((args, options))
            own.values.update((StageValue(stage, leaf), leaves[leaf]) for leaf in self._wanted[stage])
        mask = mask_of(self._recording.masks[stage], args, options)
        is_new = mask is not None and not any(mask is each for each in own.masks)
        if self._why_plain and is_new and not _sees_all(mask):
            raise UnfitStepError(self._why_plain)
        own.masks.append(mask)
        others = self._recording.outputs[stage]
        states = args[0]
        if stage == len(self._recording.outputs) - 1:
            states = own.states = self._result.new_empty(own.batch, own.length, *self._result.shape[2:])
            if own.rows.stop == sum(batch * length for batch, length in self.sizes):
                self._run_program()
        return states if others is None else (states, *([None] * len(others)))

    def _run_program(self) -> None:
        """Run the step with what all passes are given; write the states of each."""
        steps, sources, passes = self._steps, self._inputs.items(), self._passes
        inputs = [(view[each.rows], self._fitting(of, each)) for each in passes for of, (view, _) in sources]
        if len(passes) < len(steps):
            [own] = passes
            are_apart = all(own.values[of].shape[0] == own.batch for of, _ in sources)
            if not are_apart or any(mask is not None for mask in own.masks):
                raise UnfitStepError("rows of one pass are not those of a pass for each")
            passes = [replace(own, rows=slice(row, row + 1), batch=1) for row in range(own.batch)]
        for each, of_steps in zip(passes, steps, strict=True):
            of_steps.count_next(each.length)
        both = zip(passes, steps, strict=True)
        seen_by_all = [seen for each, of_steps in both for seen in self._seen_by(each, of_steps)]
        if any(self._alike) and any(seen.visible is not None for seen in seen_by_all):
            raise UnfitStepError("a mask hides tokens between others, and caches share their first ones")
        self._program.see(seen_by_all)
        self._steps = []  # until it is whole
        for of_steps in steps:
            of_steps.begin()
        for view, value in inputs:
            view.copy_(value)
        self._program.run([partial(call, self) for call in self._calls])
        for each, of_steps in zip(passes, steps, strict=True):
            of_steps.end(each.length, partial(self._queries, each))
        for each in self._passes:
            assert each.states is not None
            each.states.copy_(self._result[each.rows].view(each.states.shape))
        self._steps = steps

    def _seen_by(self, of_pass: _Pass, steps: WholeSteps) -> Iterator[Seen]:
        """Yield which tokens of its layer each row of a pass sees, as the masks of the stages say."""
        batch, length, masks = of_pass.batch, of_pass.length, of_pass.masks
        # Stages, by their mask, the number of tokens, how many first ones it has no columns for, and those of a prefix.
        alike: dict[tuple[int, int, int, int], list[int]] = {}
        for step in self._attends:
            mask = masks[step.mask]
            if not (isinstance(mask, torch.Tensor) and mask.dim() == 4) and (mask is not None or length > 1):
                raise UnfitStepError("there is no mask of sequences, queries and tokens")
            place = self._layers.index(step.layer)
            blocks, prefix = steps.blocks[place], steps.prefixes.get(place)
            shared = 0 if prefix is None else prefix.num_tokens
            alike.setdefault((id(mask), blocks.num_tokens, blocks.hidden, shared), []).append(step.mask)
        for (_, num_tokens, hidden, shared), stages in alike.items():
            columns = shared + num_tokens - hidden
            seen, pieces = _seen_of(masks[stages[0]], columns), ((0, shared), (shared, columns))
            parts = [_ranges_of(seen, start, end, batch, length) for start, end in pieces if start < end]
            if np.all([ranges[:, 0] == ranges[:, 1] for ranges, _ in parts], axis=0).any():
                raise UnfitStepError("a mask hides all tokens")
            for after_prefix, (ranges, visible) in enumerate(parts):
                yield Seen(stages, of_pass.rows.start, hidden + ranges, visible, bool(after_prefix))

    def _fitting(self, source: StageValue, of_pass: _Pass) -> torch.Tensor:
        """Return what a stage is given, for each row of a pass, if it is of the kind that was recorded."""
        value, batch, length = of_pass.values[source], of_pass.batch, of_pass.length
        view, array = self._inputs[source]
        fits = value.dtype == view.dtype and value.device == view.device and value.dim() == len(array.shape)
        differ = [at for at, size in enumerate(array.shape) if fits and value.shape[at] != size]
        # Sequences come first, and then tokens, where they are more than one. Either alone may be the first dimension.
        has_batch = batch > 1 and differ[:1] == [0] and value.shape[0] == batch
        of_tokens = differ[has_batch:]
        fits = fits and all(array.shape[at] == 1 for at in differ) and len(of_tokens) <= 1
        fits = fits and all(value.shape[at] == length for at in of_tokens)
        if not fits or (differ == [0] and batch == length > 1):
            raise UnfitStepError(f"a layer is given {tuple(value.shape)} of {value.dtype} on {value.device}")
        if array.shape[:1] != (1,):
            value, of_tokens = value[None], [at + 1 for at in of_tokens]
        if of_tokens == [0]:
            value = value[None]
        else:
            value = value.unsqueeze(1)
            value = value.transpose(1, of_tokens[0] + 1) if of_tokens else value
        return value.expand(batch, length, *view.shape[1:]).flatten(0, 1)

    @torch.inference_mode(False)
    def _build(self) -> None:
        """Make the program."""
        recording = self._recording
        in_order = [step for step in self._attends if step.keys is not None]
        assert recording.result is not None
        outside = {array.storage for array in recording.inputs.values()} | {recording.result.storage}
        outside |= {step.query.storage for step in self._attends}
        # Storages of the caller: whole rows of bytes, aligned as vectors are.
        self._given = {
            key: torch.zeros(MOST_ROWS, -(-recording.scratch[key] // 64) * 64, dtype=torch.uint8)
            for key in outside
            if key in recording.scratch
        }
        given = {key: Memory(tensor.data_ptr(), tensor.stride(0)) for key, tensor in self._given.items()}
        given |= {key: Memory(each.untyped_storage().data_ptr(), 0) for key, each in recording.constants.items()}
        scratch = {key: size for key, size in recording.scratch.items() if key not in self._given}
        operations: list[Any] = [
            Call(tuple({key for key in reads_of(step) | writes_of(step) if key in scratch}))
            if isinstance(step, PythonCall)
            else step._replace(layer=self._layers.index(step.layer))
            if isinstance(step, Attend)
            else step
            for step in self._all_steps
        ]
        self._program = StepProgram(operations, MOST_ROWS, scratch, given)
        self._calls = [self._caller(step) for step in self._all_steps if isinstance(step, PythonCall)]
        self._inputs = {source: (self._view(array), array) for source, array in recording.inputs.items()}
        self._result = self._view(recording.result)
        dtypes = [torch.bfloat16 if step.query.kind == BFLOAT16 else torch.float32 for step in in_order]
        self._shapes = [
            KVShape(0, step.num_kv_heads, step.key_dim, step.value_dim, dtype, dtype, torch.device("cpu"))
            for step, dtype in sorted(zip(in_order, dtypes, strict=True), key=lambda pair: pair[0].layer)
        ]

    def _view(self, array: Array) -> torch.Tensor:
        """An array of all rows: its first dimension is theirs, where that has one number for each row."""
        dtype = torch.float32 if array.dtype == torch.bool else array.dtype
        memory, item = self._program.memory_of(array.storage), dtype.itemsize
        num_bytes = (MOST_ROWS - 1) * memory.row_bytes + self._recording.scratch[array.storage]
        numbers = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(memory.address), dtype=torch.uint8)
        has_rows = bool(array.shape) and array.shape[0] == 1
        shape, strides = (part[1:] if has_rows else part for part in (array.shape, array.strides))
        numbers = numbers[: num_bytes // item * item].view(dtype)
        return numbers.as_strided((MOST_ROWS, *shape), (memory.row_bytes // item, *strides), array.offset)

    def _queries(self, of_pass: _Pass) -> Iterator[tuple[int, torch.Tensor]]:
        """The queries of each layer, `[batch, heads, length, head_dim]`, with the index of the layer."""
        for step in self._attends:
            kind, shape = step.query.kind, (1, step.num_kv_heads * step.group, step.key_dim)
            dtype = torch.bfloat16 if kind == BFLOAT16 else torch.float32
            rows = self._view(Array(step.query.storage, dtype, step.query.offset, shape, (0, *step.query.strides)))
            yield step.layer, rows[of_pass.rows].unflatten(0, (of_pass.batch, of_pass.length)).transpose(1, 2)

    def _caller(self, call: PythonCall) -> Callable[["StepPlan"], None]:
        """A function that makes a call with what is in memory."""
        together = [slice(None)] if call.of_all_rows else range(MOST_ROWS)
        views = [[[self._part(each, rows) for each in part] for part in (call.leaves, call.outs)] for rows in together]
        arrays = [index for index, each in enumerate(call.leaves) if isinstance(each, Array)]
        truths = [index for index in arrays if call.leaves[index].dtype == torch.bool]

        def run(plan: "StepPlan") -> None:  # a plan that refers to itself would keep the weights alive
            rows = plan._passes[-1].rows.stop
            for leaves, outs in views[:rows]:
                given, written = [plan._current(each) for each in leaves], outs
                if call.of_all_rows:
                    written = [None if each is None else each[:rows] for each in outs]
                    for index in arrays:
                        given[index] = given[index][:rows]
                taken = [given[index] for index in truths]
                for index in truths:
                    given[index] = given[index].bool()
                args, options = tree_unflatten(given, call.spec)
                result = call.function(*args, **options)
                if call.writes:
                    for index, numbers in zip(truths, taken, strict=True):
                        numbers.copy_(given[index])
                for out, new in zip(written, tree_leaves(result), strict=True):
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
            return self._passes[0].cache
        return self._passes[0].masks[leaf.stage] if isinstance(leaf, MaskOf) else leaf


def _seen_of(mask: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
    """Return which tokens a query sees, boolean `[batch, 1, queries, tokens]`, or 1 for all; `None` for all tokens."""
    if mask is not None and (mask.shape[1] != 1 or mask.shape[3] != num_tokens):
        raise UnfitStepError(f"a mask is {tuple(mask.shape)}, of a layer with {num_tokens:,} tokens")
    return None if mask is None else _shown(mask)


def _shown(mask: torch.Tensor) -> torch.Tensor | None:
    """Return which tokens a mask shows, boolean, in its shape; `None` for all."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UnfitStepError(f"a mask is of {mask.dtype}")
    shown = mask if mask.dtype == torch.bool else simplified(mask)
    if shown is not None and shown.dtype != torch.bool:
        raise UnfitStepError("a mask adds numbers to the scores, or hides all tokens")
    return shown


def _ranges_of(
    seen: torch.Tensor | None, start: int, end: int, batch: int, length: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """The ranges of some columns of a mask for each row, and the columns if they say more, see `Seen`."""
    ranges, visible = np.array([[[[0, end - start]]]]), None
    if seen is not None:
        ranges, are_too_wide = seen_ranges(seen[..., start:end])
        visible = mask_arrays(seen[..., start:end])[0] if are_too_wide else None
    of_rows = [
        None
        if each is None
        else np.broadcast_to(each[:, 0], (batch, length, each.shape[3])).reshape(batch * length, -1)
        for each in (ranges, visible)
    ]
    assert of_rows[0] is not None
    return of_rows[0], of_rows[1]


def _sees_all(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and ((shown := _shown(mask)) is None or bool(shown.all()))
