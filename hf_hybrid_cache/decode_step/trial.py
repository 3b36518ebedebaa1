"""Recording the step of a model, and stages of it that run both ways."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..cache import HybridCache
from ..errors import HybridCacheError
from ..kernels import Multiply
from .recording import OpaqueError, Recorder, Recording, Step, UnrecordableError
from .schedule import schedule
from .stages import Stages, random_tokens, run_own
from .step_plan import StepPlan, UnfitStepError

_PROMPT, _ROWS = 3, 2
# Relative to all numbers together, of a few stages; roundings of more of them add up as random ones do.
_MOST_APART = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_FEW_STAGES = 4


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
    """

    names: tuple[str, ...]
    recording: Recording
    steps: list[Step]

    def plan(self, decoder: nn.Module, rows: int) -> StepPlan:
        """Return the step for a number of sequences."""
        return StepPlan(decoder, self.names, self.recording, self.steps, rows)


@torch.inference_mode(False)
@torch.no_grad()
def recorded_step(decoder: Any, names: tuple[str, ...]) -> RecordedStep:
    """
    Record the step of a decoder, whose stages have these names, and run it both ways after a short prompt.

    Raises:
        UnknownStepError: it is no step of rows, its results differ by more than rounding, or the model's own forward
            fails.
    """
    with refusing(type(decoder).__name__):
        step = _record(decoder, names)
        _require_alike(step, decoder)
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
    cache = _new_cache(decoder.config)
    opaque = set[type]()
    run_own(decoder, cache, random_tokens(decoder, 1, _PROMPT))
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


def _new_cache(config: PreTrainedConfig) -> HybridCache:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it changes nothing
        return HybridCache(config)


def _require_alike(step: RecordedStep, decoder: Any) -> None:
    """
    Run a step of two sequences both ways.

    Raises:
        UnrecordableError: the results differ by more than rounding.
    """
    cache = _new_cache(decoder.config)
    run_own(decoder, cache, random_tokens(decoder, _ROWS, _PROMPT + 1))
    tokens, own_cache = random_tokens(decoder, _ROWS, 1, seed=1), copy.deepcopy(cache)
    plan = step.plan(decoder, _ROWS)
    if why_not := plan.take(cache):
        raise UnrecordableError(why_not)
    ours = plan.run(cache, input_ids=tokens)[0]
    own = run_own(decoder, own_cache, tokens)
    apart = (ours.float() - own.float()).norm() / own.float().norm()
    most = _MOST_APART[own.dtype] * max(1.0, len(step.recording.outputs) / _FEW_STAGES) ** 0.5
    if not apart <= most:
        raise UnrecordableError(f"its layers give other results, which differ by {apart:.0e} of all")
