"""Imports run one way, as docs/design.md draws it, and importing the package does nothing."""

import ast
import importlib
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

import hf_hybrid_cache

PACKAGE = Path(hf_hybrid_cache.__file__).parent
REPOSITORY = PACKAGE.parent

# Room -> the rooms of the package, and the heavy libraries, that it may import.
ALLOWED = {
    "kernels": {"control_groups", "errors", "kernels", "numba", "scalars", "user_folder"},
    "processes": {"errors", "torch"},
    "storage": {"control_groups", "errors", "processes", "scalars", "storage", "torch"},
    "codecs": {"codecs", "kernels", "scalars", "storage", "torch"},
    "device_kernels": {"device_kernels", "kernels", "torch", "triton"},
    "attention": {"attention", "codecs", "device_kernels", "errors", "graph_breaks", "kernels", "storage", "torch"},
    "layers": {"attention", "errors", "layers", "processes", "scalars", "storage", "torch", "transformers"},
    "errors": set(),
    "graph_breaks": {"torch"},
    "other_processes": set(),
    "control_groups": set(),
    "user_folder": set(),
    "byte_sizes": {"scalars"},
    "planning": {
        "byte_sizes",
        "cache",
        "cache_argument",
        "codecs",
        "errors",
        "layers",
        "planning",
        "prefill_chunks",
        "storage",
        "torch",
        "transformers",
        "weights",
    },
    "files": {
        "codecs",
        "durable_files",
        "errors",
        "files",
        "layers",
        "lazy_names",
        "processes",
        "scalars",
        "storage",
        "torch",
        "transformers",
    },
    "durable_files": set(),
    "numa_nodes": {"errors", "scalars"},
    "cache": {
        "attention",
        "cache",
        "cache_argument",
        "codecs",
        "files",
        "graph_breaks",
        "layers",
        "other_processes",
        "processes",
        "scalars",
        "storage",
        "token_ids",
        "torch",
        "transformers",
    },
    "model_identity": {
        "cache",
        "codecs",
        "errors",
        "kernels",
        "layers",
        "lazy_names",
        "model_identity",
        "storage",
        "torch",
        "transformers",
        "weights",
    },
    "prompt_reading": {
        "cache",
        "cache_argument",
        "durations",
        "files",
        "prefill_chunks",
        "prompt_reading",
        "scalars",
        "token_ids",
        "torch",
        "transformers",
    },
    "prefix_store": {
        "byte_sizes",
        "cache",
        "cache_argument",
        "codecs",
        "custom_generate",
        "durable_files",
        "errors",
        "files",
        "kernels",
        "layers",
        "lazy_names",
        "model_identity",
        "prefill_chunks",
        "prefix_store",
        "processes",
        "prompt_reading",
        "scalars",
        "storage",
        "token_ids",
        "torch",
        "transformers",
    },
    "durations": set(),
    "prefill_chunks": set(),
    "token_ids": {"torch"},
    "weights": {"errors", "graph_breaks", "kernels", "scalars", "storage", "torch", "transformers", "weights"},
    "decode_step": {
        "attention",
        "cache",
        "cache_argument",
        "decode_step",
        "errors",
        "kernels",
        "storage",
        "torch",
        "transformers",
        "weights",
    },
    "decode_phase": {
        "cache",
        "cache_argument",
        "custom_generate",
        "decode_phase",
        "decode_step",
        "model_identity",
        "scalars",
        "storage",
        "torch",
        "transformers",
        "weights",
    },
    "documents": {"documents", "errors"},
    "chat": {
        "cache",
        "cache_argument",
        "chat",
        "documents",
        "errors",
        "layers",
        "lazy_names",
        "prefix_store",
        "prompt_reading",
        "torch",
        "transformers",
    },
    "serve": {"cache", "chat", "errors", "prefix_store", "serve", "storage", "transformers"},
    "scalars": set(),
    "lazy_names": set(),
    "cache_argument": {"transformers"},
    "custom_generate": {"transformers"},
    "models": {"errors", "lazy_names", "models", "torch", "transformers", "user_folder"},
    "cli": {
        "attention",
        "byte_sizes",
        "cache",
        "cache_argument",
        "chat",
        "cli",
        "decode_step",
        "documents",
        "durable_files",
        "durations",
        "errors",
        "layers",
        "models",
        "other_processes",
        "planning",
        "prefill_chunks",
        "prefix_store",
        "processes",
        "prompt_reading",
        "serve",
        "torch",
        "transformers",
        "user_folder",
        "weights",
    },
}
WATCHED = {"torch", "transformers", "numba", "triton"}


# Rooms within a room, and those of them that each may import.
INNER = {
    "kernels": {
        "vector": {"vector"},
        "forms": {"forms", "vector"},
        "attention": {"attention", "forms", "vector"},
        "weights": {"forms", "vector", "weights"},
        "step": {"attention", "step", "vector", "weights"},
    },
    "storage": {
        "memory": {"memory"},
        "runs": {"memory", "runs"},
    },
}


def imported_modules(path: Path, with_types: bool = True) -> set[str]:
    """Absolute names of the modules that the module at `path` imports, wherever in it."""
    package = ".".join((PACKAGE.name, *path.relative_to(PACKAGE).parent.parts))
    names = set()
    tree = ast.parse(path.read_text())
    for_types = [
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in node.body
    ]
    for node in ast.walk(tree):
        if node in for_types and not with_types:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            # `from . import name` may import a module.
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def imported_names(path: Path) -> set[str]:
    """Rooms and watched libraries that the module at `path` imports."""
    modules = (module.split(".") for module in imported_modules(path))
    return {parts[1] if parts[0] == PACKAGE.name and len(parts) > 1 else parts[0] for parts in modules}


def modules_of(room: str) -> list[Path]:
    folder = PACKAGE / room
    return sorted(folder.glob("**/*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("room", ALLOWED)
def test_package_when_importing_then_imports_only_lower_ones(room: str):
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    for path in modules_of(room):
        imported = imported_names(path) & (rooms | WATCHED)
        assert imported <= ALLOWED[room], f"{path.name} imports {imported - ALLOWED[room]}"


@pytest.mark.parametrize(("outer", "room"), [(outer, room) for outer in INNER for room in INNER[outer]])
def test_inner_package_when_importing_then_imports_only_lower_ones(outer: str, room: str):
    rooms = INNER[outer]
    assert rooms.keys() == {path.parent.name for path in (PACKAGE / outer).glob("*/__init__.py")}
    for path in (PACKAGE / outer / room).glob("*.py"):
        modules = [module.split(".") for module in imported_modules(path)]
        imported = {parts[2] for parts in modules if parts[:2] == [PACKAGE.name, outer] and len(parts) > 3}
        assert imported & rooms.keys() <= rooms[room], f"{path.name} imports {imported}"


@pytest.mark.parametrize(
    "room",
    [
        "cache",
        "decode_phase",
        "decode_step",
        "files",
        "model_identity",
        "planning",
        "prefix_store",
        "storage",
        "weights",
    ],
)
def test_modules_when_importing_then_have_no_cycle(room: str):
    paths = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in modules_of(room)}
    imports = {
        module: {other for name in imported_modules(path, False) for other in (name, name.rpartition(".")[0])}
        & paths.keys()
        for module, path in paths.items()
    }
    while imports:
        first = {module for module, others in imports.items() if not others & imports.keys()}
        assert first, f"{sorted(imports)} import each other"
        imports = {module: others for module, others in imports.items() if module not in first}


# Modules of the package that experiments may import: public ones, and those of the planner and of models by name.
FOR_EXPERIMENTS = {
    "",
    "byte_sizes",
    "cache_argument",
    "durable_files",
    "kernels.vector.processor",  # to measure both ways
    "model_identity",
    "models",
    "models.random_weights",
    "planning",
    "planning.candidates",
    "planning.model_cost",
    "planning.plans",
    "prefix_store.folder",
    "storage",
    "user_folder",
    "weights",
}
# Rooms of which a user's program calls a few names; everything else is imported from their modules.
PUBLIC = {
    "models": {"ModelLoadError", "load", "load_config"},
    "planning": {
        "CostError",
        "Machine",
        "Plan",
        "PlanError",
        "Speeds",
        "cache_for_budget",
        "default_chunk",
        "make_plans",
        "measured_speeds",
        "model_cost",
        "recommended",
        "this_machine",
    },
}


def test_experiments_when_importing_then_import_only_listed_modules():
    for path in (REPOSITORY / "experiments").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_hybrid_cache"):
                module = (node.module or "").removeprefix("hf_hybrid_cache").removeprefix(".")
                assert module in FOR_EXPERIMENTS, f"{path.name}: {node.module}"
                assert not any(alias.name.startswith("_") for alias in node.names), path.name


@pytest.mark.parametrize("room", PUBLIC)
def test_package_when_exporting_then_has_the_listed_names(room: str):
    module = importlib.import_module(f"hf_hybrid_cache.{room}")
    assert set(module.__all__) == PUBLIC[room]
    assert all(getattr(module, name).__doc__ for name in PUBLIC[room])


def test_every_public_name_exists_and_is_documented():
    for name in hf_hybrid_cache.__all__:
        assert name == "__version__" or getattr(hf_hybrid_cache, name).__doc__


def test_package_when_imported_then_loads_no_heavy_library():
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


def test_names_that_are_imported_when_used_are_no_modules():
    """A module that is imported takes the place of a name like its own."""
    for path in PACKAGE.rglob("__init__.py"):
        module = importlib.import_module(".".join(path.parent.relative_to(REPOSITORY).parts))
        if "__getattr__" in vars(module):
            assert not set(module.__all__) & {each.stem for each in path.parent.iterdir()}, path
