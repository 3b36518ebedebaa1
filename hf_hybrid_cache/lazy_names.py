"""Names of a package that are imported when they are asked for: torch and transformers take seconds to import."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` (PEP 562) of `package`, of which `names` tells by module what comes from there."""
    modules = {name: module for module, of_module in names.items() for name in of_module}

    def imported(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{modules[name]}", package), name)

    return imported
