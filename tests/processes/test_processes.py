"""Threads, forked processes, and processes that end in the middle of something."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels import test_threads as kernel_calls
from transformers.cache_utils import Cache

from hf_hybrid_cache import DynamicHybridCache, set_num_threads
from hf_hybrid_cache.kernels import compile_in_background

from common.caches import CACHES, QUANTIZED, stock
from common.modes import answer
from common.programs import command, environment, run_program
from common.slow import slow_but
from common.soak import budget, count
from models.tiny_models import random_prompt, tiny_model

# Machines do other things besides.
SECONDS = 600
ALL_CACHES = CACHES | {name: ours for name, (ours, _) in QUANTIZED.items()}
HAS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


def generate(cache: Cache, seed: int, new_tokens: int = 6) -> list[list[int]]:
    ids = random_prompt(2, 150, seed)
    count("generate calls")
    count("tokens generated", 2 * new_tokens)
    return go_on(ids, cache, new_tokens)


def go_on(ids: torch.Tensor, cache: Cache, new_tokens: int) -> list[list[int]]:
    return answer(tiny_model("llama"), ids, cache, max_new_tokens=new_tokens).tolist()


def make(name: str) -> Cache:
    return ALL_CACHES[name](tiny_model("llama").config)


@pytest.mark.soak
@pytest.mark.parametrize("name", slow_but(["default", "two_ahead", "split_in_three", "quantized_8"], ALL_CACHES))
def test_threads_with_a_cache_each_get_the_tokens_they_get_alone(name: str):
    seeds = range(1 + budget(1))
    alone = [generate(make(name), seed) for seed in seeds]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make, [name] * len(seeds)))
        assert list(pool.map(generate, made, seeds)) == alone
    # A cache that a thread has filled goes on in another one.
    made[0].crop(-5)
    again = go_on(torch.tensor(alone[0])[:, : made[0].get_seq_length() + 1], made[0], 5)
    assert again == [row[: len(again[0])] for row in alone[0]]


def test_two_threads_that_run_a_model_with_one_cache_are_told():
    cache = DynamicHybridCache(tiny_model("llama").config)
    states = torch.randn(1, 2, 3, 16)
    cache.update(states, states, 0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cache.update, states, states, 0).result()
    with pytest.raises(RuntimeError, match=r"Two threads run a model with the same cache .* its own cache"):
        cache.update(states, states, 1)
    cache.reset()
    assert generate(cache, seed=0) == generate(stock(tiny_model("llama").config), seed=0)


def in_a_forked_child(act: Callable[[], object]) -> None:
    """Run in a child that `os.fork` makes here; fails if it does, or does not end."""
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        try:
            act()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def work_in_forked_children() -> None:
    """Fork with torch's and the kernels' threads started, caches filled, and a compilation under way."""
    torch.set_num_threads(2)
    torch.ones(1 << 22).sum()
    names = ("default", "quantized_8")
    expected = {name: generate(make(name), seed=5) for name in names}
    used = {name: make(name) for name in names}
    for cache in used.values():
        generate(cache, seed=5)
        cache.crop(-4)
    case = kernel_calls.make("bfloat16", 5000)

    def run_kernels() -> None:
        kernel_calls.run(*case, 0.125)

    def run_model() -> None:
        # torch's own threads do not live on in a child either.
        torch.set_num_threads(1)
        for name, cache in used.items():
            assert generate(make(name), seed=5) == expected[name]
            ids = torch.tensor(expected[name])[:, : cache.get_seq_length() + 1]
            again = go_on(ids, cache, 4)
            assert again == [row[: len(again[0])] for row in expected[name]]

    in_a_forked_child(run_kernels)
    in_a_forked_child(run_model)


def fork_while_a_kernel_is_compiled() -> None:
    compile_in_background(np.dtype(np.float32))
    time.sleep(0.3)
    in_a_forked_child(lambda: kernel_calls.run(*kernel_calls.make("float32", 500), 0.125))


def follow_the_threads_of_torch() -> None:
    tokens = []
    for number in (1, os.cpu_count() or 1, 1):
        torch.set_num_threads(number)
        for ours in (1, None):
            set_num_threads(ours)
            tokens.append([generate(make(name), seed=1) for name in ("default", "quantized_8")])
    assert all(each == tokens[0] for each in tokens)


@HAS_FORK
def test_tokens_when_forked_or_threads_vary_then_are_the_same():
    steps = ("follow_the_threads_of_torch", "work_in_forked_children")
    run_program("from processes import test_processes as t\n" + "\n".join(f"t.{step}()" for step in steps))


@pytest.mark.slow
@HAS_FORK
def test_a_child_that_is_forked_while_a_kernel_is_compiled_has_it(tmp_path: Path):
    run_program(
        "from processes import test_processes as t; t.fork_while_a_kernel_is_compiled()", NUMBA_CACHE_DIR=str(tmp_path)
    )


# --- processes that end in the middle of something


def ended(program: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(program), env=environment(**more), capture_output=True, text=True, timeout=SECONDS)


# Slow work reports when it is done; the process would abort if it came back later.
EXIT_WHILE_KERNELS_ARE_COMPILED = """
import sys, threading, time
from hf_hybrid_cache.kernels.compilation import _started

class Slow:
    def __init__(self, name):
        self.name, self.files = name, self

    def are_being_written(self):
        return False

    def compile(self, types):
        begun.set()
        time.sleep(1)
        print(self.name, flush=True)

begun = threading.Event()
_started([(Slow("first"), ()), (Slow("second"), ())])
assert begun.wait(600)
sys.exit(3)
"""


def test_exit_when_a_kernel_compiles_then_waits_and_starts_nothing():
    done = ended(EXIT_WHILE_KERNELS_ARE_COMPILED)
    assert (done.returncode, done.stdout, done.stderr) == (3, "first\n", "")


def act_for_ever(act: Callable[[], object], has_begun: threading.Event) -> None:
    while True:
        act()
        has_begun.set()


def fail_beside(act: Callable[[], object]) -> None:
    """Fail while another thread does something again and again."""
    has_begun = threading.Event()
    threading.Thread(target=act_for_ever, args=(act, has_begun), daemon=True).start()
    assert has_begun.wait(SECONDS)
    raise ValueError


def interrupt(act: Callable[[], object]) -> None:
    """Interrupt what is done again and again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background does not have
    has_begun = threading.Event()
    threading.Thread(target=lambda: has_begun.wait(SECONDS) and os.kill(os.getpid(), signal.SIGINT)).start()
    act_for_ever(act, has_begun)


def generate_everywhere() -> None:
    for name in ("two_ahead", "quantized_streamed", "quantized_8"):
        generate(make(name), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "codes"),
    [
        # Up to Python 3.13 an operation of torch in another thread may abort a process that ends: such a thread is
        # ended where it takes the interpreter's lock again, which torch does in destructors.
        ("fail_beside(t.generate_everywhere)", [1, -signal.SIGABRT]),
        # 1 where tabulate is installed: torch imports it at the end, and running its code lets Python forget the
        # interrupt.
        ("interrupt(t.generate_everywhere)", [-signal.SIGINT, 1]),
    ],
)
def test_process_when_ended_in_the_middle_of_work_then_exits_cleanly(call: str, codes: list[int]):
    assert ended(f"from processes import test_processes as t; t.{call}").returncode in codes
