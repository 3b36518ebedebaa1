import os

# Nothing in the tests may depend on, or wait for, a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Test processes share the cores: threads that wait must sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch


def pytest_configure() -> None:
    # Two test processes share two cores.
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")
