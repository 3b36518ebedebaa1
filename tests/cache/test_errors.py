"""Every error of the package can be caught as one."""

import pickle
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import hf_hybrid_cache
from hf_hybrid_cache import DeviceMemoryError, HostMemoryError, HybridCacheError

PACKAGE = Path(hf_hybrid_cache.__file__).parent


def defined_errors() -> set[type[BaseException]]:
    """List the exception classes of the package, by name, from the modules that define them."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        names = re.findall(r"^class (\w+(?:Error|Exception|Warning|Interrupt))\b", path.read_text(), re.MULTILINE)
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found.update(getattr(import_module(module), name) for name in names)
    return {each for each in found if issubclass(each, BaseException)}


def test_every_error_extends_the_base_and_one_that_was_there_before():
    errors = defined_errors()
    assert len(errors) > 10
    for error in errors - {HybridCacheError}:
        assert issubclass(error.__bases__[0], HybridCacheError), error
        known = next(each for each in error.__mro__ if each.__module__ in ("builtins", "torch"))
        assert known is not Exception, error


@pytest.mark.parametrize(("error", "known"), [(HostMemoryError, MemoryError), (DeviceMemoryError, RuntimeError)])
def test_an_error_when_raised_is_caught_as_either(error: type[Exception], known: type[Exception]):
    for caught in (HybridCacheError, known):
        with pytest.raises(caught, match="4 GiB"):
            raise error("4 GiB")


def test_an_error_when_pickled_is_the_same():
    error = pickle.loads(pickle.dumps(DeviceMemoryError("4 GiB")))
    assert (type(error), error.args) == (DeviceMemoryError, ("4 GiB",))
    assert isinstance(error, torch.OutOfMemoryError)
