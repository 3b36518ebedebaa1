"""Recording the step of a model, and stages of it that run both ways."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..cache import HybridCache
from ..errors import HybridCacheError
from ..kernels import Multiply
from .recording import OpaqueError, PythonCall, Recorder, Recording, Step, UnrecordableError
from .schedule import schedule
from .stages import Stages, new_cache, random_tokens, run_own
from .step_plan import StepPlan, UnfitStepError

_PROMPT, _ROWS = 3, 2
# Relative to all numbers together, of a few stages; roundings of more of them add up as random ones do.
_MOST_APART = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_FEW_STAGES = 4
# Where rounding to bfloat16 changes more, as it does where a router chooses between experts that are close.
_PERTURBATIONS, _MOST_OF_ROUNDING = 4, 2


class UnknownStepError(HybridCacheError, ValueError):
    """
    A model's decode step cannot run in one call.

    Attributes:
        why: the reason alone.
    """

    why = ""


def unknown_step(name: str, why: str) -> UnknownStepError:
    """Return the error that a decoder's step cannot run in one call."""
    error = UnknownStepError(f"A decode step of {name} cannot run in one call: {why}. Its own forward goes on.")
    error.why = why
    return error


class RecordedStep(NamedTuple):
    """
    The step of a decoder, as far as it does not depend on the number of rows.

    Attributes:
        names: of the children that are stages, or hold them.
        recording: of the stages.
        steps: those of the recording, in their order.
        why_plain: why it runs with one token of each sequence that sees all tokens alone; empty for with any rows.
        repeats_rows: a row has the same bits whatever rows come with it: all is done by kernels, or row by row.
        joins: what comes before the stages, with a token of each of several caches, gives each the bits that it has
            alone.
    """

    names: tuple[str, ...]
    recording: Recording
    steps: list[Step]
    why_plain: str = ""
    repeats_rows: bool = False
    joins: bool = False

    def plan(self, decoder: nn.Module) -> StepPlan:
        """Return the step with memory for one."""
        return StepPlan(decoder, self.names, self.recording, self.steps, self.why_plain, self.joins)


@torch.inference_mode(False)
@torch.no_grad()
def recorded_step(decoder: Any, names: tuple[str, ...]) -> RecordedStep:
    """
    Record the step of a decoder, whose stages have these names, and run it both ways after a short prompt.

    Raises:
        UnknownStepError: it is no step of rows, its results differ by more than rounding, or the model's own forward
            fails.
    """
    name = type(decoder).__name__
    with refusing(name):
        step = _record(decoder, names)
        cache = new_cache(decoder.config)
        run_own(decoder, cache, input_ids=random_tokens(decoder, _ROWS, _PROMPT + 1))
        _require_alike(step, decoder, cache, random_tokens(decoder, _ROWS, 1, seed=1))
    if any(isinstance(each, PythonCall) and HybridCache in each.leaves for each in step.steps):
        return step._replace(why_plain="several tokens, or a mask, come to a part of the step that Python calls")
    mask = torch.ones(_ROWS, _PROMPT + 4, dtype=torch.int64)
    mask[1, :2] = 0
    try:
        with refusing(name):
            _require_alike(step, decoder, cache, random_tokens(decoder, _ROWS, 2, seed=2), attention_mask=mask)
    except UnknownStepError as error:
        return step._replace(why_plain=f"with several tokens, or a mask, {error.why}")
    calls_all_rows = any(isinstance(each, PythonCall) and each.of_all_rows for each in step.steps)
    step = step._replace(repeats_rows=not calls_all_rows)
    with contextlib.suppress(UnknownStepError), refusing(name):
        step = step._replace(joins=_joins(step, decoder))
    return step


@contextlib.contextmanager
def refusing(name: str) -> Iterator[None]:
    """Raise an `UnknownStepError` where something of a decoder of this name cannot be recorded, or fails."""
    try:
        yield
    except UnknownStepError:
        raise
    except (UnrecordableError, UnfitStepError) as error:
        raise unknown_step(name, str(error)) from error
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise unknown_step(name, f"a trial of its layers ends with {type(error).__name__}: {error}") from error


def _record(decoder: Any, names: tuple[str, ...]) -> RecordedStep:
    """Record all stages, after a short prompt."""
    cache = new_cache(decoder.config)
    opaque = set[type]()
    run_own(decoder, cache, input_ids=random_tokens(decoder, 1, _PROMPT))
    while True:
        recorder = Recorder(copy.deepcopy(cache), opaque)
        try:
            Stages(decoder, names).run(recorder.cache, recorder.call, input_ids=random_tokens(decoder, 1, 1))
        except OpaqueError:
            continue
        finally:
            recorder.close()
        break
    recording = recorder.recording
    steps = schedule(recording)
    if not any(isinstance(step, Multiply) for step in steps):
        raise UnrecordableError("none of its products is one of kernels")
    return RecordedStep(names, recording, steps)


def _require_alike(step: RecordedStep, decoder: Any, cache: HybridCache, tokens: torch.Tensor, **given: Any) -> None:
    """
    Run a pass of some tokens both ways over a cache, which has them then.

    Raises:
        UnrecordableError: the results differ by more than rounding.
    """
    before, plan = copy.deepcopy(cache), step.plan(decoder)
    if why_not := plan.take([cache], [(tokens.shape[0], tokens.shape[1])]):
        raise UnrecordableError(why_not)
    ours = plan.run([(cache, {"input_ids": tokens, **given})])[0][0]
    own = run_own(decoder, copy.deepcopy(before), input_ids=tokens, **given)
    apart = _apart(ours, own)
    most = _MOST_APART[own.dtype] * max(1.0, len(step.recording.outputs) / _FEW_STAGES) ** 0.5
    if own.dtype == torch.bfloat16 and not apart <= most:
        most = _MOST_OF_ROUNDING * _apart_by_rounding(decoder, before, tokens, own, given)
    if not apart <= most:
        raise UnrecordableError(f"its layers give other results, which differ by {apart:.0e} of all")


def _joins(step: RecordedStep, decoder: Any) -> bool:
    """Return whether one pass around the stages can be run, and gives tokens of two caches the bits of a pass each."""
    caches, results = [new_cache(decoder.config) for _ in range(_ROWS)], list[torch.Tensor]()
    for length, cache in enumerate(caches, _PROMPT):
        run_own(decoder, cache, input_ids=random_tokens(decoder, 1, length))
    lengths = [torch.tensor([[cache.get_seq_length()]]) for cache in caches]
    given = [{"input_ids": random_tokens(decoder, 1, 1), "position_ids": each} for each in lengths]
    for each in (step, step._replace(joins=True)):
        plan, copies = each.plan(decoder), copy.deepcopy(caches)
        plan.take(copies, [(1, 1)] * _ROWS)
        results.append(torch.cat([out[0] for out in plan.run(list(zip(copies, given, strict=True)))]))
    return plan.border > max(map(int, lengths)) and torch.equal(*results)


def _apart(some: torch.Tensor, others: torch.Tensor) -> float:
    """The difference of states, relative to all numbers together."""
    return float((some.float() - others.float()).norm() / others.float().norm())


def _apart_by_rounding(
    decoder: Any, cache: HybridCache, tokens: torch.Tensor, own: torch.Tensor, given: dict[str, Any]
) -> float:
    """The most that the model's own results differ by from themselves where embeddings are rounded otherwise."""
    states, generator = decoder.get_input_embeddings()(tokens), torch.Generator().manual_seed(0)
    half_a_unit, results = torch.finfo(states.dtype).eps / 2, []
    for _ in range(_PERTURBATIONS):
        noise = torch.rand(states.shape, generator=generator) * 2 - 1
        perturbed = (states.float() * (1 + half_a_unit * noise)).to(states.dtype)
        results.append(_apart(run_own(decoder, copy.deepcopy(cache), inputs_embeds=perturbed, **given), own))
    return max(results)
