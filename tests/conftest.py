import os
from collections import Counter
from pathlib import Path
from typing import Any

# Nothing in the tests may depend on, or wait for, a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Test processes share the cores: threads that wait must sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from experiments import records

import soak

_COUNTS = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="let tests that search at random search long")
    parser.addoption("--soak-record", type=Path, metavar="FOLDER", help="write what was done there")


def pytest_configure(config: pytest.Config) -> None:
    # Two test processes share two cores.
    torch.set_num_threads(1)
    soak.set_soaking(config.getoption("--soak"))
    config.stash[_COUNTS] = Counter()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A test process of xdist has ended."""
    node.config.stash[_COUNTS].update(getattr(node, "workeroutput", {}).get("soak", {}))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["soak"] = soak.counts()
        return
    counts = config.stash[_COUNTS] + Counter(soak.counts())
    if folder := config.getoption("--soak-record"):
        record = {
            "tests_failed": session.testsfailed,
            "exit_status": int(exitstatus),
            "counts": dict(sorted(counts.items())),
        }
        print(f"\nrecord: {records.save('soak', record, folder)}")
