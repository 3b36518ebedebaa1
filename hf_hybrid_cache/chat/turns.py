"""Turns of several answers: all that wait for a token get one in the same round, and prompts are read in between."""

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decode_step import repeats_rows, run_together
from ..scalars import MOST_ROWS

# Yields the arguments of a pass of the model, and is sent its outputs, and the seconds that it took beside others.
Steps = Generator[dict[str, Any], tuple[Any, float], Any]


def _always() -> bool:
    return True


@dataclass(eq=False)
class _Going:
    """
    An answer that is generated.

    Attributes:
        steps: of it.
        joins: whether its passes run with those of others, as a row has the same bits whatever rows come with it.
        inputs: the arguments of the pass that it waits for, if it waits for one.
        ended: has its result.
    """

    steps: Steps
    joins: bool = False
    inputs: dict[str, Any] = field(default_factory=dict)
    ended: "Future[Any]" = field(default_factory=Future)


class Turns:
    """
    Generates answers of one model on one thread, and lets those who read prompts on others take turns with it.

    A round is a pass for each answer, run as one where they can be, and the choice of its next token. Between two
    rounds one of the others gets the turn: first who waits for something that is true by now, such as the end of an
    answer, then who has waited longest to read. Whoever has the turn computes alone. All answers have one thread,
    because libraries keep threads of their own for each.

    Args:
        model: of the answers.
    """

    def __init__(self, model: PreTrainedModel):
        self._model, self._new = weakref.ref(model), SimpleQueue[_Going | None]()
        self._lock, self._is_taken, self._has_read = threading.Lock(), False, False
        # Who waits to read, and for what; and the next round, from the time it is asked for until it begins.
        self._reading = list[tuple[Callable[[], bool], Future[None]]]()
        self._round: Future[None] | None = None
        self._told = list[Callable[[], object]]()
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def run(self, steps: Steps) -> "Future[Any]":
        """Run the steps of an answer, beside those of others; return what they will return."""
        going = _Going(steps)
        with self._lock:  # before whoever has read gives its turn away, so that nobody reads in between
            self._new.put(going)
            self._next_round()
        return going.ended

    def tell(self, call: Callable[[], object]) -> None:
        """Call something that wakes another thread once all answers have taken a step: then kernels run, beside it."""
        self._told.append(call)

    def end(self) -> None:
        """End the thread, once no answer is generated: at the end of the program it must not be at work."""
        self._new.put(None)
        if self._thread is not threading.current_thread():  # on which the last one who knows it may be forgotten
            self._thread.join()

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
            self._give()

    @contextmanager
    def given(self, until: Callable[[], bool]) -> Iterator[None]:
        """Give the turn away within the block; have it again once something is true that the turns of others change."""
        future = Future[None]()
        with self._lock:  # before those who wait for nothing else, so that what has ended is told before others read
            self._reading.insert(0 if until is not _always else len(self._reading), (until, future))
            self._pass_on()
        try:
            yield
        finally:
            future.result()

    def pause(self, until: Callable[[], bool] = _always) -> None:
        """Give the turn away, see `given`, and have it again."""
        with self.given(until):
            pass

    def _next_round(self) -> "Future[None]":
        """Ask for a round, if nobody has; return what has a result once it has the turn."""
        if self._round is None:
            self._round = Future()
            if not self._is_taken:
                self._pass_on()
        return self._round

    def _give(self) -> None:
        with self._lock:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next one have the turn, if there is one."""
        ready = next((each for each in self._reading if each[0]()), None)
        self._is_taken = True
        if self._round is not None and (self._has_read or ready is None):
            self._has_read = False
            self._round.set_result(None)
        elif ready is not None:
            self._reading.remove(ready)
            self._has_read = True
            ready[1].set_result(None)
        else:
            self._is_taken = False

    def _work(self) -> None:
        """Generate what there is, in rounds."""
        going = list[_Going | None]()
        while None not in going:
            if not going:
                going.append(self._new.get())
            with self._lock:
                following = self._next_round()
            following.result()
            with self._lock:
                self._round = None
                while not self._new.empty():
                    going.append(self._new.get())
            going[:] = self._after_round([each for each in going if each]) + [None] * going.count(None)
            self._give()

    @torch.no_grad()
    def _after_round(self, going: list[_Going]) -> list[_Going]:
        """Run a round; return the answers that go on."""
        if (model := self._model()) is None:  # which answers hold
            return []
        for each in going:
            if not each.inputs:
                self._go_on(each, partial(next, each.steps))
                each.joins = repeats_rows(model)
        self._tell_all()  # of first tokens, before a pass
        for group in _groups([each for each in going if each.inputs]):
            start = time.perf_counter()
            try:
                outs = run_together(model, [each.inputs | {"return_dict": True} for each in group])
            except BaseException as error:
                for each in group:
                    self._go_on(each, partial(each.steps.throw, error))
                continue
            seconds = time.perf_counter() - start
            for each, out in zip(group, outs, strict=True):
                self._go_on(each, partial(each.steps.send, (out, seconds)))
        self._tell_all()
        return [each for each in going if each.inputs]

    def _tell_all(self) -> None:
        """Call what was to be told so far."""
        told, self._told = self._told, []
        for call in told:
            call()

    def _go_on(self, going: _Going, step: Callable[[], dict[str, Any]]) -> None:
        """Let an answer take a step, after which it waits for another pass, or has ended."""
        going.inputs = {}
        try:
            going.inputs = step()
        except StopIteration as end:
            self.tell(partial(going.ended.set_result, end.value))
        except BaseException as error:
            self.tell(partial(going.ended.set_exception, error))


def _groups(going: Sequence[_Going]) -> Iterator[list[_Going]]:
    """Yield passes that run as one, of answers that join others; else each alone."""
    group, rows = list[_Going](), 0
    for each in going:
        more = each.inputs["input_ids"].numel()
        if group and (rows + more > MOST_ROWS or not (each.joins and group[-1].joins)):
            yield group
            group, rows = [], 0
        group.append(each)
        rows += more
    if group:
        yield group
