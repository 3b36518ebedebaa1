"""
Settings of all test processes, options of the make targets, and which tests a run skips.

    make test        `-m "not slow"`: every property once, and short searches at random
    .ci/run          that, and an eighth of the slow tests: `--slow=K/8` (see common/slow.py)
    make test-all    all of them
    make soak        `-m soak --soak=FOLDER`: long searches, and a record of what held (see common/soak.py)
"""

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

from experiments.common.instructions import variables_without
from hf_hybrid_cache.system.user_folder import cache_home

# As on another processor: CONTRIBUTING.md says how. Before Numba and torch are imported, which read it then.
os.environ.update(variables_without(*os.environ.get("HF_HYBRID_CACHE_TEST_WITHOUT", "").split()))
# Nothing in the tests may depend on, or wait for, a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nor on defaults of who runs them.
os.environ["HF_HYBRID_CACHE_DEFAULTS"] = ""
# Test processes share the cores: threads that wait must sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Compiled kernels stay where they are, also for tests that set another home.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_home().parent))
# Kernels are tested on several threads, though torch has one here.
if hasattr(os, "sched_getaffinity"):
    os.environ.setdefault("HF_HYBRID_CACHE_NUM_THREADS", str(min(2, len(os.sched_getaffinity(0)))))

import hypothesis
import numpy as np
import pytest
import torch

from hf_hybrid_cache.kernels import compile_in_background
from hf_hybrid_cache.kernels.attention.workspace import set_prefill_kernel
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels

from common import slow, soak
from device_kernels import interpreted

pytest.register_assert_rewrite("weights.quantized_models")

# What a shell starts in the background ignores Ctrl-C, which some tests press.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports Triton.
interpreted.load()

_STARTED = time.monotonic()


@pytest.fixture
def exact_kernels() -> Iterator[None]:
    """Compute attention to codes without rounding queries and weights, for tests of what a cache holds."""
    set_integer_kernels(False)
    yield
    set_integer_kernels(None)


@pytest.fixture
def short_prompts_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let codecs be chosen with the first block that is due, so that short prompts are quantized."""
    monkeypatch.setattr("hf_hybrid_cache.layers.layer_stores._CHOOSING_BLOCKS", 1)


@pytest.fixture
def torch_attends() -> Iterator[None]:
    """Let torch attend with many queries, as by default where it is faster."""
    set_prefill_kernel(False)
    yield
    set_prefill_kernel(None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", metavar="K/N", help="of slow tests only every n-th, from the k-th on")
    parser.addoption("--soak", type=Path, metavar="FOLDER", help="search at random for long; write there what was done")


def pytest_configure(config: pytest.Config) -> None:
    # Two test processes share two cores.
    torch.set_num_threads(1)
    # Programs that tests start would inherit what nohup, or the background of a script, ignores.
    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    is_soaking = config.getoption("--soak") is not None
    if is_soaking:
        soak.begin()
    # The same examples every time, but in a soak; what fails then says how to repeat it.
    hypothesis.settings.register_profile("tests", deadline=None, derandomize=not is_soaking, print_blob=is_soaking)
    hypothesis.settings.load_profile("tests")
    # By default collections take a twentieth of the run, and more while modules are imported.
    gc.set_threshold(100_000)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow.mark_all_but_default(items)
    part = config.getoption("--slow")
    if part is not None:
        items[:], left_out = slow.part_of_slow(part, items)
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if session.config.getoption("loadgroup", False) and grouped and "@" not in grouped[0].nodeid:
        raise pytest.UsageError("This pytest-xdist does not keep groups of tests together with this pytest.")
    # A million objects of modules and tests live until the end: a collection need not go over them each time.
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        item.user_properties += soak.take_counts().items()  # come to the process that writes the record


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """At the end of all test processes."""
    folder = config.getoption("--soak")
    if folder is None:
        return
    # Takes seconds, which every test process would spend.
    from experiments.common import records

    passed, failed, errors = map(terminalreporter.getreports, ("passed", "failed", "error"))
    counts: Counter[str] = Counter()
    for report in [*passed, *failed]:
        counts.update(dict(report.user_properties))
    record = {
        "seconds": round(time.monotonic() - _STARTED, 1),
        "exit_status": int(exitstatus),
        "tests_passed": len(passed),
        "tests_failed": [report.nodeid for report in [*failed, *errors]],
        "counts": dict(sorted(counts.items())),
    }
    terminalreporter.write_line(f"record: {records.save('soak', record, folder)}")


@pytest.fixture(scope="session", autouse=True)
def kernels_that_most_tests_use() -> None:
    """
    Compile them, or load them, before any test.

    Numba changes the filters of warnings meanwhile, also in the background, and a test would see others than it set.
    """
    for element in ("float32", "uint16"):
        for is_quantized in (False, True):
            compile_in_background(np.dtype(element), is_quantized)
    for thread in threading.enumerate():
        if thread.name == "compile kernels":
            thread.join()


@pytest.fixture(autouse=True)
def torch_asks_subclasses() -> Iterator[None]:
    """A test that leaves `with torch._C.DisableTorchFunctionSubclass()` in the middle would spoil all after it."""
    yield
    assert torch._C._is_torch_function_enabled()
