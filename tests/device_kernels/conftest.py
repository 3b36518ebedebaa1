from collections.abc import Iterator

import pytest
import torch

import interpreted


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where Triton runs kernels: on a GPU, and without one on the CPU, where it interprets them."""
    if (reason := interpreted.why_not()) is not None:
        pytest.skip(reason)
    with interpreted.told():
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
