"""The Pythons that have llama.cpp and ik_llama.cpp: their options, and why a library cannot be measured here."""

import argparse
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from experiments.peers import ik_llama_cpp, llama_cpp
from experiments.peers.step_rows import LIBRARIES

MODULES = {"llama.cpp": ("llama_cpp", llama_cpp.INSTALL), "ik_llama.cpp": ("ik_llama_cpp", ik_llama_cpp.INSTALL)}


def add_python_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for the Python of each library."""
    for library in LIBRARIES:
        option = f"--{library.replace('.', '-').replace('_', '-')}-python"
        parser.add_argument(
            option, dest=library, default=sys.executable, help=f"that has {library} (default: this one)"
        )


def pythons_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The values of these options, by library."""
    return {library: getattr(arguments, library) for library in LIBRARIES}


def reasons_to_leave_out(pythons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons why libraries cannot be measured here, by library."""
    if find_spec("llama_cpp") is None:  # it writes the files of both
        return dict.fromkeys(LIBRARIES, f"not installed: {llama_cpp.INSTALL}")
    reasons = {}
    for library, (module, install) in MODULES.items():
        if failure := llama_cpp.failure_of([pythons[library], "-c", f"import {module}"]):
            reasons[library] = f"not installed: {install}" if "ModuleNotFoundError" in failure else failure
    return reasons
