"""Importing the names of a package when they are first used: torch and transformers take seconds to import."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], list[str]]:
    """Make the `__getattr__` (PEP 562) and `__all__` of `package`; `names` lists its names by module."""
    modules = {name: module for module, of_module in names.items() for name in of_module}

    def imported(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{modules[name]}", package), name)

    return imported, list(modules)
