"""Turns of several answers: all that wait for a token get one in the same round, and prompts are read in between."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decode_step import repeats_rows, run_together
from ..scalars import MOST_ROWS

_Pass = tuple[dict[str, Any], "Future[Any]"]


class Turns:
    """
    Lets answers of one model take turns; whoever has the turn computes alone.

    An answer gives the turn away between the chunks of its prompt, with each pass for a token, and at its end. Once
    all answers that generate have given a pass, these run as one where they can, on one thread, because libraries keep
    threads of their own for each. Between two such rounds one answer gets the turn to read: the one that has waited
    longest.

    Args:
        model: of the answers.
    """

    def __init__(self, model: PreTrainedModel):
        self._model, self._thread = model, ThreadPoolExecutor(1, "passes")
        self._lock, self._is_taken = threading.Lock(), False
        self._passes = list[_Pass]()
        # Gives the turn back to an answer, with what came of its pass.
        self._returning = deque[Callable[[], None]]()
        # Who waits to read, and for what.
        self._reading = list[tuple[Callable[[], bool], Future[None]]]()
        self._has_read = False  # since the last round

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn within the block."""
        future = Future[None]()
        with self._lock:
            self._reading.append((_always, future))
            if not self._is_taken:
                self._pass_on()
        future.result()
        try:
            yield
        finally:
            with self._lock:
                self._pass_on()

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Give the turn away until it comes back, and until something is true that the turns of others change."""
        future = Future[None]()
        with self._lock:
            self._reading.append((until or _always, future))
            self._pass_on()
        future.result()

    def run(self, inputs: dict[str, Any]) -> Any:
        """Give the turn away until a pass for a token has run; return its outputs."""
        future = Future[Any]()
        with self._lock:
            self._passes.append((inputs, future))
            self._pass_on()
        return future.result()

    def _pass_on(self) -> None:
        """Let the next one have the turn, if there is one."""
        ready = next((each for each in self._reading if each[0]()), None)
        self._is_taken = True
        if self._returning:
            self._returning.popleft()()
        elif self._passes and (self._has_read or ready is None):
            passes, self._passes, self._has_read = self._passes, [], False
            self._thread.submit(self._run, passes)
        elif ready is not None:
            self._reading.remove(ready)
            self._has_read = True
            ready[1].set_result(None)
        else:
            self._is_taken = False

    @torch.no_grad()
    def _run(self, passes: Sequence[_Pass]) -> None:
        """Run a round of passes."""
        for group in self._groups(passes):
            try:
                outs = run_together(self._model, [inputs for inputs, _ in group])
                self._returning += [partial(each.set_result, out) for (_, each), out in zip(group, outs, strict=True)]
            except BaseException as error:
                self._returning += [partial(each.set_exception, error) for _, each in group]
        with self._lock:
            self._pass_on()

    def _groups(self, passes: Sequence[_Pass]) -> Iterator[list[_Pass]]:
        """Yield passes that run as one, where a row has the same bits whatever rows come with it; else each alone."""
        most = MOST_ROWS if len(passes) > 1 and repeats_rows(self._model) else 1
        group, rows = list[_Pass](), 0
        for each in passes:
            more = each[0]["input_ids"].numel()
            if group and rows + more > most:
                yield group
                group, rows = [], 0
            group.append(each)
            rows += more
        yield group


class InTurns:
    """Stands in the place of a model in its decoding loop, whose passes run in turns; all else is the model's."""

    def __init__(self, turns: Turns, model: Any):
        self._turns, self._model = turns, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._turns.run(inputs)


def _always() -> bool:
    return True
