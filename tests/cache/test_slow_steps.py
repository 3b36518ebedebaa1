"""Warnings of slow steps: they are told from pauses, longer contexts and other work, by simulated times."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cache import slow_steps
from hf_hybrid_cache.cache.slow_steps import SlowSteps
from hf_hybrid_cache.cache_argument import cache_argument

from models.tiny_models import random_prompt, tiny_model

USUAL = 0.040
# Enough to know what is usual, and to hear of what is not.
MANY = 64


class Others:
    """Pretends that other processes keep so many processors busy."""

    def __init__(self, busy: float):
        self.busy = busy

    def processors(self) -> float:
        return self.busy


class Steps:
    """Takes steps of any length, at once."""

    def __init__(self, busy: float = 1.0):
        self.now = 100.0
        self.num_tokens = 4000
        self.slow_steps = SlowSteps(lambda: Others(busy), lambda: self.now)

    def take(self, number: int, seconds: float | Callable[[int], float], pause: float = 0.001, batch: int = 1) -> None:
        for index in range(number):
            self.slow_steps.begin(self.num_tokens, batch)
            self.now += seconds(index) if callable(seconds) else seconds
            self.slow_steps.end()
            self.now += pause
            self.num_tokens += 1


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_steps, "_has_warned", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def quiet():
    """Fail on any warning inside the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_slow_steps_when_other_processes_are_busy_then_warn_once_with_cure():
    steps = Steps(busy=1.2)
    steps.take(MANY, USUAL)
    message = (
        r"Decode steps take 160 ms, 4\.0 times as long as before, while other processes keep 1\.2 processors busy.*"
        r"set GOMP_SPINCOUNT=0 in the environment before Python starts, or use fewer threads than 2 \(OMP_NUM_THR"
    )
    with pytest.warns(UserWarning, match=message):
        steps.take(MANY, 4 * USUAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (steps, Steps()):
            each.take(MANY, USUAL)
            each.take(MANY, 4 * USUAL)


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_cure_when_taken_already_then_is_not_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "0")
    steps = Steps()
    steps.take(MANY, USUAL)
    with pytest.warns(UserWarning, match="slowest thread: use fewer threads than 2") as found:
        steps.take(MANY, 4 * USUAL)
    assert "GOMP_SPINCOUNT" not in str(found[0].message)


def test_warning_when_half_of_the_steps_are_slow_then_comes():
    steps = Steps()
    steps.take(MANY, USUAL)
    with pytest.warns(UserWarning, match="Decode steps take 160 ms"):
        steps.take(MANY, lambda index: 4 * USUAL if index % 2 else USUAL)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "seconds",
    [
        2.9 * USUAL,
        lambda index: 4 * USUAL if index % 16 < 7 else USUAL,
        lambda index: 100.0 if index % 10 == 0 else USUAL,  # a process that was stopped, a page that was not there
    ],
)
def test_steps_when_hardly_slower_then_do_not_warn(seconds: float | Callable[[int], float]):
    steps = Steps()
    steps.take(MANY, USUAL)
    steps.take(10 * MANY, seconds)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("busy", [0.0, 0.2, -1.0, float("nan")])
def test_slow_steps_when_no_process_is_busy_then_do_not_warn(busy: float):
    steps = Steps(busy)
    steps.take(MANY, USUAL)
    steps.take(10 * MANY, 4 * USUAL)


@pytest.mark.usefixtures("quiet")
def test_pauses_between_steps_do_not_count():
    steps = Steps()
    steps.take(MANY, USUAL)
    steps.take(10 * MANY, USUAL, pause=3 * USUAL)


@pytest.mark.usefixtures("quiet")
def test_slow_steps_when_only_for_a_moment_then_do_not_warn():
    steps = Steps()
    for _ in range(20):
        steps.take(MANY, USUAL)
        steps.take(16, 4 * USUAL)


@pytest.mark.usefixtures("quiet")
def test_steps_when_always_slow_then_do_not_warn():
    Steps().take(10 * MANY, 4 * USUAL)


@pytest.mark.usefixtures("quiet")
def test_steps_when_context_grows_then_do_not_warn():
    steps = Steps()
    steps.num_tokens = 100
    steps.take(200_000, lambda index: USUAL + index * 1e-5)


@pytest.mark.usefixtures("quiet")
def test_steps_when_length_batch_or_threads_differ_then_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    steps = Steps()
    steps.take(MANY, USUAL)
    steps.take(MANY, 4 * USUAL, batch=8)
    steps.num_tokens = 30_000
    steps.take(MANY, 8 * USUAL, batch=8)
    steps.num_tokens = 100
    steps.take(MANY, USUAL)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    steps.take(MANY, 4 * USUAL)


@pytest.mark.usefixtures("quiet")
def test_steps_when_there_is_a_single_thread_then_do_not_warn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    steps = Steps()
    steps.take(MANY, USUAL)
    steps.take(MANY, 4 * USUAL)


@pytest.mark.usefixtures("quiet")
def test_slow_steps_when_still_fast_then_do_not_warn():
    steps = Steps()
    steps.take(MANY, 0.001)
    steps.take(MANY, 0.014)


@pytest.mark.usefixtures("quiet")
def test_pass_when_ended_half_way_then_is_not_timed():
    steps = Steps()
    steps.take(MANY, USUAL)
    for _ in range(MANY):
        steps.slow_steps.begin(steps.num_tokens, 1)  # and never comes to the last layer
        steps.now += 4 * USUAL
        steps.slow_steps.begin(steps.num_tokens, 1)
        steps.now += USUAL
        steps.slow_steps.end()
        steps.slow_steps.end()


# Caches


class Noted(SlowSteps):
    """Records the steps that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    def begin(self, num_tokens: int, batch: int) -> None:
        self.told.append((num_tokens, batch))

    def end(self) -> None:
        self.told.append("end")


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("batch", [1, 2])
def test_cache_when_decoding_then_times_decode_steps_only(family: str, batch: int):
    model, ids = tiny_model(family), random_prompt(batch, 12)
    cache = DynamicHybridCache(model.config)
    cache._steps = noted = Noted()
    one_layer = cache._first == cache._last
    for chunk in (ids[:, :8], ids[:, 8:9], ids[:, 9:11], ids[:, 11:]):
        model(chunk, **cache_argument(cache))
    end = [] if one_layer else ["end"]
    assert noted.told == [(8, batch), *end, (11, batch), *end]


def test_slow_steps_when_copied_then_are_independent():
    steps = Steps()
    steps.take(MANY, USUAL)
    twin = copy.deepcopy(steps.slow_steps)
    assert twin._best == steps.slow_steps._best
    assert twin._best is not steps.slow_steps._best
