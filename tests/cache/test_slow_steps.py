"""Warnings of slow steps: they are told from pauses, longer contexts and other work, by simulated times."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cache import slow_steps
from hf_hybrid_cache.cache.slow_steps import SlowSteps
from hf_hybrid_cache.cache_argument import cache_argument

from models.tiny_models import random_prompt, tiny_model

USUAL = 0.040
SLOW = 4 * USUAL
# Enough to know what is usual, and to hear of what is not.
MANY = 64


class Phase(NamedTuple):
    """Some steps; `seconds` may depend on the number of a step."""

    number: int
    seconds: float | Callable[[int], float]
    pause: float = 0.001
    batch: int = 1
    num_tokens: int | None = None
    threads: int = 2


class Steps:
    """Takes steps of any length, at once, while other processes keep so many processors busy."""

    def __init__(self, busy: float = 1.0):
        self.now, self.num_tokens = 100.0, 4000
        self.slow_steps = SlowSteps(lambda: SimpleNamespace(processors=lambda: busy), lambda: self.now)

    def take(self, *phases: Phase) -> None:
        for number, seconds, pause, batch, num_tokens, threads in phases:
            self.num_tokens = num_tokens or self.num_tokens
            with mock.patch.object(torch, "get_num_threads", lambda threads=threads: threads):
                for index in range(number):
                    self.slow_steps.begin(self.num_tokens, batch)
                    self.now += seconds(index) if callable(seconds) else seconds
                    self.slow_steps.end()
                    self.now += pause
                    self.num_tokens += 1


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_steps, "_has_warned", False)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


FIRST, THEN = Phase(MANY, USUAL), Phase(MANY, SLOW)


def test_slow_steps_when_other_processes_are_busy_then_warn_once_with_cure():
    steps = Steps(busy=1.2)
    steps.take(FIRST)
    message = (
        r"Decode steps take 160 ms, 4\.0 times as long as before, while other processes keep 1\.2 processors busy.*"
        r"set GOMP_SPINCOUNT=0 in the environment before Python starts, or use fewer threads than 2 \(OMP_NUM_THR"
    )
    with pytest.warns(UserWarning, match=message):
        steps.take(THEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (steps, Steps()):
            each.take(FIRST, THEN)


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_half_of_the_steps_are_enough_and_a_cure_taken_is_not_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "0")
    with pytest.warns(UserWarning, match="take 160 ms.*slowest thread: use fewer threads than 2") as found:
        Steps().take(FIRST, Phase(MANY, lambda index: SLOW if index % 2 else USUAL))
    assert "GOMP_SPINCOUNT" not in str(found[0].message)


QUIET: dict[str, list[Phase]] = {
    "hardly slower": [FIRST, Phase(10 * MANY, 2.9 * USUAL)],
    "less than half of them slow": [FIRST, Phase(10 * MANY, lambda index: SLOW if index % 16 < 7 else USUAL)],
    # A process that was stopped, a page that was not there.
    "some very slow": [FIRST, Phase(10 * MANY, lambda index: 100.0 if index % 10 == 0 else USUAL)],
    "pauses between them": [FIRST, Phase(10 * MANY, USUAL, pause=3 * USUAL)],
    "slow for a moment": [FIRST, Phase(16, SLOW)] * 20,
    "always slow": [Phase(10 * MANY, SLOW)],
    "a context that grows": [Phase(200_000, lambda index: USUAL + index * 1e-5, num_tokens=100)],
    "other lengths, batches and threads": [
        FIRST,
        Phase(MANY, SLOW, batch=8),
        Phase(MANY, 2 * SLOW, batch=8, num_tokens=30_000),
        Phase(MANY, USUAL, num_tokens=100),
        Phase(MANY, SLOW, threads=64),
    ],
    "a single thread": [FIRST._replace(threads=1), THEN._replace(threads=1)],
    "still fast": [Phase(MANY, 0.001), Phase(MANY, 0.014)],
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", QUIET)
def test_steps_when_there_is_another_reason_then_do_not_warn(name: str):
    Steps().take(*QUIET[name])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("busy", [0.2, -1.0, float("nan")])
def test_slow_steps_when_no_process_is_busy_then_do_not_warn(busy: float):
    Steps(busy).take(FIRST, Phase(10 * MANY, SLOW))


@pytest.mark.filterwarnings("error")
def test_pass_when_ended_half_way_then_is_not_timed():
    steps = Steps()
    steps.take(FIRST)
    for _ in range(MANY):
        steps.slow_steps.begin(steps.num_tokens, 1)  # and never comes to the last layer
        steps.now += SLOW
        steps.take(Phase(1, USUAL, pause=0))
        steps.slow_steps.end()


class Noted(SlowSteps):
    """Records the steps that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    def begin(self, *step: int) -> None:
        self.told.append(step)

    def end(self) -> None:
        self.told.append("end")


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_cache_when_decoding_then_times_decode_steps_only(family: str):
    model, cache = tiny_model(family), DynamicHybridCache(tiny_model(family).config)
    cache._steps = noted = Noted()
    for tokens in (8, 1, 2, 1):
        model(random_prompt(2, tokens), **cache_argument(cache))
    end = [] if cache._first == cache._last else ["end"]  # one layer takes no time that could be compared
    assert noted.told == [(8, 2), *end, (11, 2), *end]
