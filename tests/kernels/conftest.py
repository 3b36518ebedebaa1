from collections.abc import Iterator

import pytest

from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels


@pytest.fixture(autouse=True)
def default_way() -> Iterator[None]:
    """Tests choose how codes are multiplied; those after them find it as it was."""
    yield
    set_integer_kernels(None)
