from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_hybrid_cache.kernels import set_integer_kernels

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one test process have all tests of a way to multiply codes, so that the other does not compile the same."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        if _HERE in item.path.parents and parameters is not None and "is_integer" in parameters.params:
            way = "integer" if parameters.params["is_integer"] else "portable"
            item.add_marker(pytest.mark.xdist_group(f"kernels, {way}"))


@pytest.fixture(autouse=True)
def default_way() -> Iterator[None]:
    """Tests choose how codes are multiplied; those after them find it as it was."""
    yield
    set_integer_kernels(None)
