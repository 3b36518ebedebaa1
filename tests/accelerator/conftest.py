"""Tests that need an accelerator: CUDA, or with `--simulate` the simulated one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import simulated

_HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--simulate", action="store_true", help="run tests/accelerator on the simulated accelerator")


def pytest_configure(config: pytest.Config) -> None:
    # Before the processes of xdist start, so that they find it built.
    if config.getoption("--simulate") and simulated.why_not() is None:
        simulated.load(config.cache.mkdir("simulated"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _HERE not in item.path.parents or torch.accelerator.is_available():
        return
    if item.config.getoption("--simulate", default=False):
        pytest.skip(simulated.why_not())
    pytest.skip("needs an accelerator: CUDA, or `pytest tests/accelerator --simulate`")


@pytest.fixture
def in_any_order() -> Iterator[None]:
    """Run the work of the device in an order that differs each time."""
    from accelerator.orders import ORDERS, in_order  # when there is a device

    with in_order(ORDERS[-1]):
        yield
