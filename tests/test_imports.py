"""Importing the package does nothing; `.importlinter` says which room may import which."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hf_hybrid_cache

PACKAGE = Path(hf_hybrid_cache.__file__).parent


def test_experiments_when_importing_then_use_no_private_name():
    for path in (PACKAGE.parent / "experiments").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_hybrid_cache"):
                assert not any(alias.name.startswith("_") for alias in node.names), path.name


@pytest.mark.parametrize("room", ["", ".models", ".planning"])
def test_every_public_name_exists_and_is_documented(room: str):
    module = importlib.import_module(f"hf_hybrid_cache{room}")
    assert all(name == "__version__" or getattr(module, name).__doc__ for name in module.__all__)


def test_the_package_and_files_of_tensors_when_imported_then_load_no_torch():
    program = """
import sys, hf_hybrid_cache
assert not {"torch", "transformers", "numba", "numpy"} & set(sys.modules)
import hf_hybrid_cache.files.tensor_file
assert not {"torch", "transformers", "numba"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_importing_changes_nothing_and_needs_no_extra():
    program = """
import sys, warnings
warnings.simplefilter("error")
import torch, transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
before = dict(ALL_ATTENTION_FUNCTIONS), torch.nn.functional.scaled_dot_product_attention, torch.get_num_threads()
from hf_hybrid_cache import *
after = dict(ALL_ATTENTION_FUNCTIONS), torch.nn.functional.scaled_dot_product_attention, torch.get_num_threads()
assert before == after
extras = {"typer", "gguf", "matplotlib", "hypothesis", "pytest", "optimum"}
assert not extras & set(sys.modules), extras & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_names_that_are_imported_when_used_are_no_modules():
    """A module that is imported takes the place of a name like its own."""
    for path in PACKAGE.rglob("__init__.py"):
        module = importlib.import_module(".".join(path.parent.relative_to(PACKAGE.parent).parts))
        if "__getattr__" in vars(module):
            assert not set(module.__all__) & {each.stem for each in path.parent.iterdir()}, path
