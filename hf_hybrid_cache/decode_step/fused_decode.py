"""A model whose decode steps run in one call, where a step is of the known kind."""

import contextlib
import inspect
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import output_capturing

from ..cache import HybridCache, is_unaltered
from ..cache_argument import cache_argument, passed_cache
from .known_models import KnownModel, UnknownStepError, is_own_forward, known_model, unknown_step
from .snapshot import Snapshot
from .step_plan import StepPlan
from .trial import require_alike

# More rows are those of a prompt, for which products of many tokens are faster.
MOST_ROWS = 8
# Arguments of a step; some models hand on the last one, which only their output head uses.
_TAKEN = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values", "cache_params"}
_TAKEN |= {"logits_to_keep"}
# Those that only another pass has as `False`.
_OFF = {"use_cache", "return_dict"}


@dataclass
class _Recognised:
    """A model as it was at one time: how its steps run in one call, or why they do not."""

    snapshot: Snapshot
    known: KnownModel | str
    # A plan has memory for one step. A thread takes it out, and another one meanwhile makes one for itself.
    plans: list[StepPlan] = field(default_factory=list)


class FusedDecode:
    """
    Runs the decode steps of a model in one call, in the place of the forward of its decoder; `print` it.

    In a `with` block it is undone at the end.

    Attributes:
        fused_steps: number of steps that have run so.
        other_passes: number of forward passes that the model's own forward has run, by the reason.
    """

    def __init__(self, decoder: PreTrainedModel):
        # At most one. It refers to the weights, which are to go with the model, whoever still has this object.
        recognised: list[_Recognised] = []
        self._recognised = recognised
        # A model that refers to itself would stay in memory until Python looks for such circles.
        self._decoder = weakref.ref(decoder, lambda _: recognised.clear())
        self._is_on = True
        self.fused_steps = 0
        self.other_passes: Counter[str] = Counter()

    @property
    def __signature__(self) -> inspect.Signature:
        decoder = self._decoder()
        return inspect.signature(FusedDecode.__call__ if decoder is None else type(decoder).forward.__get__(decoder))

    def __reduce__(self) -> Any:
        """Let a copy of the model have its own."""
        return FusedDecode, (self._decoder(),)

    def __repr__(self) -> str:
        passes = self.other_passes.most_common()
        others = "".join(f"\n  {count:,} passes by the model's own forward: {why}" for why, count in passes)
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decoder = self._decoder()
        assert decoder is not None
        if not self._is_on or torch.compiler.is_compiling():
            return type(decoder).forward(decoder, *args, **kwargs)
        out = self._run(decoder, args, kwargs)
        if not isinstance(out, str):
            self.fused_steps += 1
            return out
        self.other_passes[out] += 1
        return type(decoder).forward(decoder, *args, **kwargs)

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
        """Run a step; return the output of the model, or the reason why its own forward has to run."""
        cache, states, tokens = passed_cache(given), given.get("inputs_embeds"), given.get("input_ids")
        given_as: Any = states if tokens is None else tokens
        if args or (tokens is None) == (states is None) or getattr(given_as, "ndim", 0) != (2 if states is None else 3):
            return "the arguments are not those of a step"
        if not isinstance(cache, HybridCache) or not is_unaltered(cache):
            return "the cache is not of this package"
        rows, length, *_ = given_as.shape
        if length != 1:
            return "several tokens come at once"
        if rows > MOST_ROWS:
            return f"there are more than {MOST_ROWS} sequences"
        if why_other := _why_other(decoder, given):
            return why_other
        recognised = self.recognise(decoder)
        if isinstance(recognised.known, str):
            return recognised.known
        plan = None
        with contextlib.suppress(IndexError):
            plan = recognised.plans.pop()
        if plan is None or plan.rows != rows:
            plan = StepPlan(recognised.known, rows)
        out = _step(plan, decoder, cache, given)
        recognised.plans[:] = [plan]
        return out


def _recognise(decoder: PreTrainedModel) -> tuple[Snapshot, KnownModel | str]:
    """Note what a model is, and recognise it; return the reason if its steps cannot run in one call."""
    snapshot = Snapshot(decoder)
    try:
        known = known_model(decoder)
        if (other := snapshot.foreign) is not None:
            raise unknown_step(known.name, f"it calls {other.__qualname__} of {other.__code__.co_filename}")
        require_alike(known, decoder)
    except UnknownStepError as error:
        return snapshot, error.why
    return snapshot, known


def _step(plan: StepPlan, decoder: Any, cache: HybridCache, given: dict[str, Any]) -> Any:
    """Run a step over a cache; return the output of the model, or the reason why its own forward has to run."""
    if why_not := plan.take(cache):
        return why_not
    num_tokens, states = plan.num_tokens, given.get("inputs_embeds")
    if not _sees_all(given.get("attention_mask"), plan.rows, num_tokens + 1):
        return "a mask hides tokens"
    states = decoder.get_input_embeddings()(given["input_ids"]) if states is None else states
    positions = given.get("position_ids")
    positions = torch.full((1, 1), num_tokens) if positions is None else positions
    angles = decoder.rotary_emb(states, position_ids=positions)
    if why_not := plan.unfit(states, *angles):
        return why_not
    out = plan.run(states, *angles)
    return BaseModelOutputWithPast(last_hidden_state=out, **cache_argument(cache))


def _why_other(decoder: PreTrainedModel, given: dict[str, Any]) -> str:
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


def _sees_all(mask: Any, rows: int, num_tokens: int) -> bool:
    """Whether a mask hides none of the tokens."""
    if mask is None:
        return True
    return isinstance(mask, torch.Tensor) and mask.shape == (rows, num_tokens) and bool(mask.all())


def fuse_decode(model: PreTrainedModel) -> FusedDecode:
    """
    Let the decode steps of a model on the CPU run in one call.

    A step is one token of up to eight sequences after those in a cache of this package. Where anything else is asked
    for, the model's own forward runs, as fast as before; `print` what is returned to see how often, and why.

    Args:
        model: of a known form: Llama, Mistral, Qwen2, Qwen3, SmolLM3, and others with the same layers. Its weights may
            be quantized before or after.

    Returns:
        What runs the steps: a context manager that is undone at the end of a `with` block, or by `undo()`.

    Raises:
        UnknownStepError: the model is not of a known form, or some of its layers, which are tried, give other results.

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
            why = fused.recognise(decoder).known
    except BaseException:
        fused.undo()
        raise
    if isinstance(why, str):
        fused.undo()
        raise unknown_step(type(decoder).__name__, why)
    return fused


def fuse_where_known(model: PreTrainedModel) -> FusedDecode:
    """
    Let decode steps run in one call where the model is of a known form by then, and is on the CPU.

    Nothing changes if another library has replaced the decoder's forward.
    """
    decoder: Any = model.get_decoder()
    there = vars(decoder).get("forward")
    if isinstance(there, FusedDecode):
        return there
    fused = FusedDecode(decoder)
    if there is None or is_own_forward(there, vars(decoder)):
        decoder.forward = fused
    return fused


def is_fused(model: PreTrainedModel) -> bool:
    """Return whether decode steps of a model run in one call where they can."""
    return isinstance(vars(model.get_decoder()).get("forward"), FusedDecode)
