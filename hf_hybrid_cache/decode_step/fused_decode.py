"""A model whose decode steps run in one call, where a step is one that was recorded."""

import contextlib
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from ..cache import HybridCache, is_unaltered
from ..cache_argument import CACHE_ARGUMENT, passed_cache
from ..kernels import Products
from ..scalars import MOST_ROWS
from .snapshot import Snapshot
from .stages import layers_of, stage_names, undecorated
from .step_plan import StepPlan, UnfitStepError
from .trial import RecordedStep, UnknownStepError, recorded_step, refusing, unknown_step

# Arguments of a step; some models hand on the last one, which only their output head uses.
_TAKEN = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values", "cache_params"}
_TAKEN |= {"logits_to_keep"}
# Those that only another pass has as `False`.
_OFF = {"use_cache", "return_dict"}
# Those of the backward pass do nothing where no gradients are recorded.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass
class _Recognised:
    """A model as it was at one time: its step, or why that does not run in one call."""

    snapshot: Snapshot
    step: RecordedStep | str
    # A plan has memory for one step. A thread takes it out, and another one meanwhile makes one for itself.
    plans: list[StepPlan] = field(default_factory=list)


class FusedDecode:
    """
    Runs the decode steps of a model in one call, in the place of the forward of its decoder; `print` it.

    In a `with` block it is undone at the end.

    Attributes:
        fused_steps: number of steps that have run so.
        other_passes: number of forward passes that the model's own forward has run, by the reason.
        passes_apart: number of times that passes which `run_together` was given ran one after the other, likewise.
        head: the output head, if its forward is replaced, too.
    """

    def __init__(self, decoder: PreTrainedModel):
        # At most one. It refers to the weights, which are to go with the model, whoever still has this object.
        recognised: list[_Recognised] = []
        self._recognised = recognised
        # A model that refers to itself would stay in memory until Python looks for such circles.
        self._decoder = weakref.ref(decoder, lambda _: recognised.clear())
        self.head: weakref.ref[nn.Linear] | None = None
        self._is_on = True
        self._passes = threading.local()
        self.fused_steps = 0
        self.other_passes: Counter[str] = Counter()
        self.passes_apart: Counter[str] = Counter()

    @property
    def __signature__(self) -> inspect.Signature:
        decoder = self._decoder()
        return inspect.signature(FusedDecode.__call__ if decoder is None else type(decoder).forward.__get__(decoder))

    @property
    def ran_last(self) -> bool:
        """Whether the last pass of this thread ran in one call, of which the output head is a part then."""
        return getattr(self._passes, "are_fused", False)

    @property
    def repeats_rows(self) -> bool:
        """
        Whether a token has the same bits whatever tokens come with it in a pass, as the model is now.

        Otherwise several tokens in one pass may be others than one by one, by rounding.
        """
        decoder = self._decoder()
        if decoder is None or not self._is_on:
            return False
        step = self.recognise(decoder).step
        return not isinstance(step, str) and step.repeats_rows

    def __reduce__(self) -> Any:
        """Let a copy of the model have its own."""
        return FusedDecode, (self._decoder(),)

    def __repr__(self) -> str:
        passes = self.other_passes.most_common()
        others = "".join(f"\n  {count:,} passes by the model's own forward: {why}" for why, count in passes)
        for why, count in self.passes_apart.most_common():
            others += f"\n  {count:,} times passes of several caches ran one after the other: {why}"
        return f"{self.fused_steps:,} decode steps in one call{others}"

    def __enter__(self) -> "FusedDecode":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Let the model's own forward run all steps again."""
        self._is_on = False
        self._recognised.clear()
        decoder = self._decoder()
        if decoder is not None and vars(decoder).get("forward") is self:
            del decoder.forward
        head = None if self.head is None else self.head()
        if head is not None and isinstance(vars(head).get("forward"), _OutputHead):
            del head.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decoder = self._decoder()
        assert decoder is not None
        if not self._is_on or torch.compiler.is_compiling():
            return type(decoder).forward(decoder, *args, **kwargs)
        if (given := getattr(self._passes, "result", None)) is not None:
            return given
        out = self._run(decoder, args, kwargs)
        self._passes.are_fused = not isinstance(out, str)
        if isinstance(out, str):
            self.other_passes[out] += 1
            return type(decoder).forward(decoder, *args, **kwargs)
        return out

    def recognise(self, decoder: PreTrainedModel) -> _Recognised:
        """Return what the model is now; it is looked at anew, and some layers are tried, if anything was changed."""
        for recognised in self._recognised:
            if recognised.snapshot.holds(decoder):
                return recognised
        self._recognised.clear()  # before what it has replaced is needed twice
        recognised = _Recognised(*_recognise(decoder))
        self._recognised[:] = [recognised]
        return recognised

    def _run(self, decoder: PreTrainedModel, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Run a step; return the output of the decoder, or the reason why its own forward has to run."""
        if args:
            code = undecorated(type(decoder).forward).__code__
            named = dict(zip(code.co_varnames[1 : code.co_argcount], args, strict=False))
            if len(named) < len(args) or named.keys() & given.keys():
                return "the arguments are not those of a step"
            given = {**named, **given}
        outs = self._run_all(decoder, [given])
        return outs if isinstance(outs, str) else outs[0]

    def _run_all(self, decoder: PreTrainedModel, passes: Sequence[Mapping[str, Any]]) -> list[Any] | str:
        """Run passes of several caches as one step; return the outputs of the decoder, or why it is none."""
        caches, sizes = list[HybridCache](), list[tuple[int, int]]()
        for given in passes:
            cache, states, tokens = passed_cache(given), given.get("inputs_embeds"), given.get("input_ids")
            given_as: Any = states if tokens is None else tokens
            if (tokens is None) == (states is None) or getattr(given_as, "ndim", 0) != (2 if states is None else 3):
                return "the arguments are not those of a step"
            if not isinstance(cache, HybridCache) or not is_unaltered(cache):
                return "the cache is not of this package"
            caches.append(cache)
            sizes.append(tuple(given_as.shape[:2]))
        if sum(batch * length for batch, length in sizes) > MOST_ROWS:
            return f"more than {MOST_ROWS} tokens come at once"
        if why_other := next(filter(None, (_why_other(decoder, given) for given in passes)), ""):
            return why_other
        recognised = self.recognise(decoder)
        if isinstance(recognised.step, str):
            return recognised.step
        plan = None
        with contextlib.suppress(IndexError):
            plan = recognised.plans.pop()
        plan = plan or recognised.step.plan(decoder)
        why_other = plan.take(caches, sizes)
        if not why_other and plan.sizes != sizes:
            recognised.plans[:] = [plan]
            if not all(isinstance(each.get("attention_mask"), (torch.Tensor, type(None))) for each in passes):
                return "a mask is not of sequences, queries and tokens"
            firsts, lengths = ([length for _, length in each] for each in (plan.sizes, sizes))
            return self._run_in_two(decoder, passes, firsts, lengths)
        if not why_other:
            names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
            kept = [{name: each[name] for name in names if each.get(name) is not None} for each in passes]
            try:
                outs = plan.run(list(zip(caches, kept, strict=True)))
                self.fused_steps += 1
            except UnfitStepError as error:
                why_other = str(error)
        recognised.plans[:] = [plan]
        return why_other or outs

    def run_together(self, model: PreTrainedModel, passes: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run passes of a model whose decoder this is, see the function of this name."""
        decoder: Any = model.get_decoder()
        outs = self._run_all(decoder, passes)
        if isinstance(outs, str):
            self.passes_apart[outs] += 1
            return [model(**each) for each in passes]
        # What follows the decoder runs once, for the states of all.
        states = [each.last_hidden_state for each in outs]
        joined = torch.cat([each.flatten(0, 1) for each in states])[None]
        self._passes.result, self._passes.are_fused = type(outs[0])(last_hidden_state=joined), True
        try:
            whole = model(**{name: value for name, value in passes[0].items() if name != "logits_to_keep"})
        finally:
            self._passes.result = None
        results, all_logits = [], whole.logits[0].split([each.shape[0] * each.shape[1] for each in states])
        for given, out, of_pass, logits in zip(passes, outs, states, all_logits, strict=True):
            kept, logits = given.get("logits_to_keep") or 0, logits.unflatten(0, of_pass.shape[:2])
            logits = logits[:, slice(-kept, None) if isinstance(kept, int) else kept]
            results.append(type(whole)(logits=logits, **{CACHE_ARGUMENT: out[CACHE_ARGUMENT]}))
        return results

    def _run_in_two(
        self, decoder: PreTrainedModel, passes: Sequence[Mapping[str, Any]], firsts: list[int], lengths: list[int]
    ) -> list[Any] | str:
        """Run passes of these lengths as two steps, of which the first ends where a block of a cache is full."""
        parts = zip(passes, firsts, lengths, strict=True)
        outs = self._run_all(decoder, [_part_of(given, 0, first, length) for given, first, length in parts])
        if isinstance(outs, str):
            return outs
        left = [index for index, (first, length) in enumerate(zip(firsts, lengths, strict=True)) if first < length]
        rest = [_part_of(passes[index], firsts[index], lengths[index], lengths[index]) for index in left]
        others = self._run_all(decoder, rest)
        if isinstance(others, str):
            others = [self(**each) for each in rest]
        for index, out in zip(left, others, strict=True):
            out.last_hidden_state = torch.cat([outs[index].last_hidden_state, out.last_hidden_state], dim=1)
            outs[index] = out
        return outs


class _OutputHead:
    """
    Computes the logits of a few tokens by kernels, in the place of the forward of a linear head in full precision.

    So those of a token have the same bits whatever tokens come with it. Of a quantized head they have them anyway.
    """

    def __init__(self, fused: FusedDecode, head: nn.Linear):
        self._fused, self._head = fused, weakref.ref(head)
        fused.head = self._head

    def __reduce__(self) -> Any:
        return _OutputHead, (self._fused, self._head())

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        head = self._head()
        assert head is not None
        weight, bias, is_bfloat16 = head.weight, head.bias, states.dtype == torch.bfloat16
        fits = (
            1 <= states.numel() // max(1, states.shape[-1]) <= MOST_ROWS
            and all(type(each) is nn.Parameter and each.is_contiguous() for each in (weight, bias) if each is not None)
            and all(each.is_cpu and each.dtype == states.dtype for each in (states, weight, bias) if each is not None)
            and (is_bfloat16 or states.dtype == torch.float32)
            and states.shape[-1] == weight.shape[1]
            and self._fused.ran_last
            and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
        )
        if not fits:
            return type(head).forward(head, states)
        rows, columns = weight.shape
        states, out = states.contiguous(), states.new_empty(*states.shape[:-1], rows)
        products = Products.of_numbers(weight.data_ptr(), 1, rows, columns, is_bfloat16)
        num_tokens, of_bias = states.numel() // columns, 0 if bias is None else bias.data_ptr()
        products.multiply(0, states.data_ptr(), num_tokens, is_bfloat16, of_bias, out.data_ptr())
        return out


def _part_of(given: Mapping[str, Any], start: int, end: int, length: int) -> dict[str, Any]:
    """The arguments of some tokens of a pass of `length` tokens."""
    part = dict(given)
    for name, value in given.items():
        if name == "attention_mask" and value is not None:
            value = value[:, :, start:end] if value.dim() == 4 and value.shape[2] == length else value
            part[name] = value[..., : value.shape[-1] - (length - end)]
        elif name == "inputs_embeds" and value is not None:
            part[name] = value[:, start:end]
        elif name in ("input_ids", "position_ids") and value is not None:
            part[name] = value[..., start:end]
    return part


def _recognise(decoder: PreTrainedModel) -> tuple[Snapshot, RecordedStep | str]:
    """Note what a model is, and record its step; return the reason if that cannot run in one call."""
    name, names = type(decoder).__name__, tuple[str, ...](decoder._modules)
    try:
        with refusing(name):
            _raise_first(_unfit_weights(decoder), name)
            names = stage_names(decoder)
        snapshot = Snapshot(decoder, names)
        _raise_first(_code_of_others(decoder, names), name)
        if (other := snapshot.foreign) is not None:
            raise unknown_step(name, f"it calls {other.__qualname__} of {other.__code__.co_filename}")
        return snapshot, recorded_step(decoder, names)
    except UnknownStepError as error:
        return Snapshot(decoder, names), error.why


def _raise_first(reasons: Iterator[str], name: str) -> None:
    for reason in reasons:
        raise unknown_step(name, reason)


def _unfit_weights(decoder: Any) -> Iterator[str]:
    """Yield what keeps a step from being recorded before anything runs."""
    if not layers_of(decoder):
        yield "it has no list of layers"
    weights = [*decoder.parameters()]
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    if others := dtypes - {torch.float32, torch.bfloat16}:
        yield f"it is in {' and '.join(sorted(map(str, others)))}, not in torch.float32 or torch.bfloat16"
    if devices := {weight.device.type for weight in weights} - {"cpu"}:
        yield f"its weights are on {' and '.join(sorted(devices))}, not in host memory"


def _code_of_others(decoder: Any, names: tuple[str, ...]) -> Iterator[str]:
    """All that runs in the modules of stages beside their forward, or changes it."""
    modules = [module for name in names for module in decoder._modules[name].modules()]
    hooks = [getattr(module, name) for module in modules for name in _HOOKS]
    hooks += [getattr(torch_modules, f"_global{name}") for name in _HOOKS]
    # Once outputs were asked for, transformers' hooks stay, and do nothing while none are collected.
    if any(getattr(hook, "__module__", None) != output_capturing.__name__ for each in hooks for hook in each.values()):
        yield "a module has hooks"
    for attributes in map(vars, modules):
        if "forward" in attributes and not is_own_forward(attributes["forward"], attributes):
            yield "the forward of a module was replaced"
        if attributes["training"]:
            yield "a module is in training mode"


def is_own_forward(forward: Any, attributes: Mapping[str, Any]) -> bool:
    """Whether a forward that stands among the attributes of a module is that of its class, as accelerate leaves it."""
    owner: Any = getattr(forward, "__self__", None)
    kind: Any = type(owner)
    return getattr(owner, "__dict__", None) is attributes and forward.__func__ is kind.forward


def _why_other(decoder: PreTrainedModel, given: Mapping[str, Any]) -> str:
    """Return what keeps any step of a call from running in one, or an empty string."""
    config: Any = decoder.config
    if torch.is_grad_enabled():
        return "gradients are recorded"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if config.output_attentions or config.output_hidden_states:
        return "hidden states or attentions are asked for"
    if output_capturing._active_collector.get():
        return "outputs of modules are collected"
    if not getattr(config, "return_dict", True):
        return "config.return_dict is False"
    for name, value in given.items():
        if name in _OFF:
            if value is False:
                return f"{name}=False is given"
        elif name not in _TAKEN and value is not None and value is not False:
            return f"{name} is given"
    return ""


def fuse_decode(model: PreTrainedModel) -> FusedDecode:
    """
    Let the decode steps of a model on the CPU run in one call.

    A step is up to 16 tokens, of one sequence or of several, after those in a cache of this package. Where anything
    else is asked for, the model's own forward runs, as fast as before; `print` what is returned to see how often, and
    why.

    Args:
        model: any decoder whose step is one of rows; it is recorded as the model computes it. Its weights may be
            quantized before or after.

    Returns:
        What runs the steps: a context manager that is undone at the end of a `with` block, or by `undo()`.

    Raises:
        UnknownStepError: the step cannot be recorded, or gives other results than the model's own forward.

    Example:
        >>> quantize_weights(model, bits=4)
        >>> fused = fuse_decode(model)
        >>> model.generate(**inputs, cache=cache)
        >>> print(fused)
    """
    fused, decoder = fuse_where_known(model), model.get_decoder()
    why: Any = "the forward of the model was replaced, as accelerate does it; load the model without device_map"
    try:
        if is_fused(model):
            why = fused.recognise(decoder).step
    except BaseException:
        fused.undo()
        raise
    if isinstance(why, str):
        fused.undo()
        raise unknown_step(type(decoder).__name__, why)
    return fused


def fuse_where_known(model: PreTrainedModel) -> FusedDecode:
    """
    Let decode steps run in one call where the step of the model can be recorded by then, on the CPU.

    Nothing changes if another library has replaced the decoder's forward.
    """
    decoder: Any = model.get_decoder()
    there = vars(decoder).get("forward")
    if isinstance(there, FusedDecode):
        return there
    fused = FusedDecode(decoder)
    if there is None or is_own_forward(there, vars(decoder)):
        decoder.forward = fused
        head: Any = model.get_output_embeddings()
        if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head):
            vars(head)["forward"] = _OutputHead(fused, head)
    return fused


def is_fused(model: PreTrainedModel) -> bool:
    """Return whether decode steps of a model run in one call where they can."""
    return isinstance(vars(model.get_decoder()).get("forward"), FusedDecode)


def repeats_rows(model: PreTrainedModel) -> bool:
    """Return whether steps of a model run in one call, in which a token has the same bits whatever comes with it."""
    fused = vars(model.get_decoder()).get("forward")
    return isinstance(fused, FusedDecode) and bool(fused.repeats_rows)


def run_together(model: PreTrainedModel, passes: Sequence[Mapping[str, Any]]) -> list[Any]:
    """
    Run forward passes of several caches, as one decode step where they can be one: weights are read once for all.

    They can be if each could be a step of `fuse_decode` by itself, and all have up to 16 tokens together. Otherwise
    they run one after the other; `FusedDecode.passes_apart` counts why. Tokens have the bits that they would have alone
    where `repeats_rows(model)`, and so have the caches. Run it without gradients, as `generate` runs.

    Args:
        model: with an output head.
        passes: arguments of `model` for each pass by their names, of that pass alone: `input_ids`, `[batch, length]`, a
            cache of its own that holds tokens, under the name that transformers has for it, and `attention_mask`,
            `position_ids` and `logits_to_keep` as far as the pass needs them.

    Returns:
        What `model` returns for each: its `logits`, `[batch, tokens to keep, vocabulary]`, and its cache.

    Raises:
        ValueError: two passes have the same cache.

    Example:
        >>> passes = [{"input_ids": token, "cache": cache} for token, cache in clients]
        >>> next_tokens = [out.logits[:, -1].argmax(-1) for out in run_together(model, passes)]
    """
    if len({id(passed_cache(each)) for each in passes}) < len(passes):
        raise ValueError(f"Each of the {len(passes)} passes needs a cache of its own, and two have the same, or none.")
    fused = vars(model.get_decoder()).get("forward")
    if len(passes) < 2 or not isinstance(fused, FusedDecode):
        return [model(**each) for each in passes]
    return fused.run_together(model, passes)
