"""Recording the step of a model, and stages of it that run both ways."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from ..cache import HybridCache
from ..errors import HybridCacheError
from ..kernels import Multiply
from .recording import OpaqueError, Recorder, Recording, Step, UnrecordableError
from .schedule import schedule
from .stages import Stages, random_tokens, run_own
from .step_plan import StepPlan, UnfitStepError

_PROMPT, _ROWS = 3, 2
# Relative to all numbers together: weights in full precision are multiplied with other sums than torch's.
_MOST_APART = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Attributes that every module has.
_OF_ALL = vars(nn.Module()).keys()


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
    name = type(decoder).__name__
    try:
        step = _record(decoder, names)
        _require_alike(step, decoder)
    except (UnrecordableError, UnfitStepError) as error:
        raise unknown_step(name, str(error)) from error
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise unknown_step(name, f"a trial of its layers ends with {type(error).__name__}: {error}") from error
    return step


def _record(decoder: Any, names: tuple[str, ...]) -> RecordedStep:
    """Record all stages, after a short prompt."""
    cache = HybridCache(_without_windows(decoder.config))
    opaque = set[type]()
    run_own(decoder, cache, random_tokens(decoder, 1, _PROMPT))
    while True:
        recorder = Recorder(copy.deepcopy(cache), opaque)
        try:
            Stages(decoder, recorder.call, names).run(recorder.cache, input_ids=random_tokens(decoder, 1, 1))
        except OpaqueError:
            continue
        break
    recording = recorder.recording
    steps = schedule(recording)
    if not any(isinstance(step, Multiply) for step in steps):
        raise UnrecordableError("none of its products is one of kernels")
    return RecordedStep(names, recording, steps)


def _without_windows(config: Any) -> Any:
    """A config whose layers of windows keep all tokens, which are fewer here."""
    config = copy.deepcopy(config.get_text_config(decoder=True))
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        config.sliding_window = config.attention_chunk_size = None
    else:
        windows = ("sliding_attention", "chunked_attention")
        config.layer_types = ["full_attention" if kind in windows else kind for kind in kinds]
    return config


def _require_alike(step: RecordedStep, decoder: Any) -> None:
    """
    Run a step of two sequences both ways.

    Raises:
        UnrecordableError: the results differ by more than rounding.
    """
    cache = HybridCache(decoder.config)
    run_own(decoder, cache, random_tokens(decoder, _ROWS, _PROMPT + 1))
    tokens, own_cache = random_tokens(decoder, _ROWS, 1, seed=1), copy.deepcopy(cache)
    plan = step.plan(decoder, _ROWS)
    if why_not := plan.take(cache):
        raise UnrecordableError(why_not)
    ours = plan.run(cache, input_ids=tokens)[0]
    own = run_own(decoder, own_cache, tokens)
    apart = (ours.float() - own.float()).norm() / own.float().norm()
    if not apart <= _MOST_APART[own.dtype]:
        raise UnrecordableError(f"its layers give other results, which differ by {apart:.0e} of all")
