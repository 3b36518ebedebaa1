"""Imports run one way, as docs/design.md draws it, and importing the package does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_hybrid_cache

PACKAGE = Path(hf_hybrid_cache.__file__).parent
REPOSITORY = PACKAGE.parent

# Room -> the rooms of the package, and the heavy libraries, that it may import.
ALLOWED = {
    "kernels": {"control_groups", "kernels", "numba", "scalars", "user_folder"},
    "processes": {"processes", "torch"},
    "storage": {"control_groups", "processes", "scalars", "storage", "torch"},
    "codecs": {"codecs", "kernels", "scalars", "storage", "torch"},
    "device_kernels": {"device_kernels", "kernels", "torch", "triton"},
    "attention": {"attention", "codecs", "device_kernels", "kernels", "storage", "torch"},
    "layers": {"attention", "layers", "processes", "scalars", "storage", "torch", "transformers"},
    "other_processes": set(),
    "control_groups": set(),
    "user_folder": set(),
    "planning": {
        "_version",
        "cache_argument",
        "codecs",
        "layers",
        "other_processes",
        "planning",
        "scalars",
        "storage",
        "torch",
        "transformers",
        "user_folder",
        "weights",
    },
    "saving": {"_version", "codecs", "layers", "processes", "saving", "storage", "torch", "transformers"},
    "cache": {
        "attention",
        "cache",
        "cache_argument",
        "codecs",
        "layers",
        "other_processes",
        "planning",
        "processes",
        "saving",
        "scalars",
        "storage",
        "token_ids",
        "torch",
        "transformers",
    },
    "prompt_reading": {"cache", "cache_argument", "prompt_reading", "scalars", "token_ids", "torch", "transformers"},
    "token_ids": {"torch"},
    "weights": {"kernels", "scalars", "storage", "torch", "transformers", "weights"},
    "decode_phase": {"cache", "cache_argument", "decode_phase", "storage", "torch", "transformers", "weights"},
    "jobs": {"jobs"},
    "scalars": set(),
    "lazy_names": set(),
    "cache_argument": {"transformers"},
    "models": {"lazy_names", "models", "torch", "transformers", "user_folder"},
    "cli": {
        "attention",
        "cache",
        "cache_argument",
        "cli",
        "jobs",
        "layers",
        "models",
        "other_processes",
        "planning",
        "processes",
        "prompt_reading",
        "saving",
        "torch",
        "transformers",
        "user_folder",
        "weights",
    },
}
WATCHED = {"torch", "transformers", "numba", "triton"}


def imported_names(path: Path, room: str) -> set[str]:
    """Rooms and watched libraries that the module at `path` imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = {0: "", 1: f"{room}." if path.parent != PACKAGE else "hf_hybrid_cache."}
            modules = [prefix.get(node.level, "hf_hybrid_cache.") + (node.module or "")]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            names.add(parts[1] if parts[0] == "hf_hybrid_cache" and len(parts) > 1 else parts[0])
    return names


def modules_of(room: str) -> list[Path]:
    folder = PACKAGE / room
    return sorted(folder.glob("**/*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_stands_below_it(room: str):
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    for path in modules_of(room):
        imported = imported_names(path, room) & (rooms | WATCHED)
        assert imported <= ALLOWED[room], f"{path.name} imports {imported - ALLOWED[room]}"


def test_experiments_use_only_public_names():
    for path in (REPOSITORY / "experiments").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_hybrid_cache"):
                allowed = {
                    f"hf_hybrid_cache{room}"
                    for room in (
                        "",
                        ".cache_argument",
                        ".jobs",
                        ".models",
                        ".planning",
                        ".planning.calibration",
                        ".storage",
                    )
                }
                assert node.module in allowed, f"{path.name}: {node.module}"
                assert not any(alias.name.startswith("_") for alias in node.names), path.name


def test_every_public_name_exists_and_is_documented():
    for name in hf_hybrid_cache.__all__:
        assert name == "__version__" or getattr(hf_hybrid_cache, name).__doc__


def test_importing_the_package_alone_takes_no_heavy_library():
    program = "import sys, hf_hybrid_cache; assert not {'torch', 'transformers', 'numba', 'numpy'} & set(sys.modules)"
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
