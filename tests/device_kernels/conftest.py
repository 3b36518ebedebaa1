from collections.abc import Iterator

import pytest
import torch

from device_kernels import interpreted


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device on which Triton runs kernels: a GPU, or else the CPU, where it interprets them."""
    if (reason := interpreted.why_not()) is not None:
        pytest.skip(reason)
    with interpreted.told():
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
