"""Kernels are compiled once for each element type, are kept where that can be, and are never in the way."""

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

import hf_hybrid_cache
from hf_hybrid_cache import minmax
from hf_hybrid_cache.kernels.attention.attention import attention_kernels
from hf_hybrid_cache.kernels.attention.codes import quantized_attention_kernels
from hf_hybrid_cache.kernels.attention.prefill_attention import prefill_kernels
from hf_hybrid_cache.kernels.forms.blocks import coding_kernels
from hf_hybrid_cache.kernels.forms.panels import panel_kernels
from hf_hybrid_cache.kernels.vector.compiled import Needed
from hf_hybrid_cache.kernels.weights.experts import expert_kernels
from hf_hybrid_cache.kernels.weights.gemm import gemm_kernels
from hf_hybrid_cache.kernels.weights.products import product_kernels
from kernels import calls

from common.programs import TESTS, run_program
from weights.test_matrices import made

PACKAGE = Path(hf_hybrid_cache.__file__).parent
NAMES = {torch.float32: "float32", torch.bfloat16: "uint16", torch.float16: "int16"}
SMALL = "kernels.small_kernels.small"
CALL_SMALL = """
from numba.core.typing.typeof import typeof_impl
from kernels.small_kernels import another, small
types = len(typeof_impl.registry)
assert small() == 1
assert len(typeof_impl.registry) == types, "other calls look through more types than before"
print(sum(small.stats.cache_misses.values()), sum(small.stats.cache_hits.values()))
"""
COMPILED, LOADED = "1 0", "0 1"


def code(dtype: torch.dtype) -> None:
    codec, states = minmax(4, rotate=False).keys, torch.ones(1, 1, 64, 64, dtype=dtype)
    codec.decode(codec.encode(states), states)


def attend(way: str = "few", **sizes: int) -> Callable[[torch.dtype], object]:
    return lambda dtype: calls.run(*calls.make(str(dtype).removeprefix("torch."), 70, **sizes), way=way)


def multiply_few(dtype: torch.dtype) -> None:
    for kind in ("rows", "4 bits"):
        made(kind, 16, 32, dtype)[0].multiply_chosen(
            torch.ones(1, 32, dtype=dtype), torch.zeros(1, 1, dtype=torch.int64)
        )
    made("4 bits", 16, 32)[0].multiply(torch.ones(1, 32, dtype=dtype))


def add_up_experts(dtype: torch.dtype) -> None:
    for kind in ("rows", "4 bits"):
        (up, _), (down, _), ones = made(kind, 32, 16, dtype), made(kind, 16, 16, dtype), torch.ones(1, 16, dtype=dtype)
        up.add_up_experts(down, ones, torch.zeros(1, 1, dtype=torch.int64), ones[:, :1], None, None)


Ahead = Callable[[np.dtype], list[Needed]]
FAMILIES: dict[str, tuple[Ahead, Callable[[torch.dtype], object]]] = {
    "attention": (attention_kernels, attend()),
    "attention to codes": (lambda _: quantized_attention_kernels(), attend(first=1, coded=3)),
    "attention of many queries": (prefill_kernels, attend("many", length=70)),
    "codes": (lambda _: coding_kernels(), code),
    "quantized weights": (lambda _: panel_kernels(), lambda dtype: made.__wrapped__("4 bits", 16, 32, dtype)),
    "products with weights": (lambda _: product_kernels(), multiply_few),
    "many products with quantized weights": (
        lambda _: gemm_kernels(),
        lambda dtype: made("4 bits", 16, 32)[0].multiply(torch.ones(40, 32, dtype=dtype)),
    ),
    "experts": (lambda _: expert_kernels(), add_up_experts),
}
CASES = [(name, dtype) for name in FAMILIES for dtype in NAMES if dtype != torch.float16 or "attention" in name]


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_compiling_ahead_and_a_call_leave_one_overload_and_one_file(family: str, dtype: torch.dtype):
    ahead, call = FAMILIES[family]
    needed = ahead(np.dtype(NAMES[dtype]))
    for kernel, types in needed:
        kernel.compile(types)
    before = [(types in kernel.overloads, len(kernel.overloads), files_of(kernel)) for kernel, types in needed]
    call(dtype)
    assert before == [(True, len(kernel.overloads), files_of(kernel)) for kernel, _ in needed]
    for kernel, _ in needed:
        # Files are found by the signatures of calls, so that another process finds them.
        assert {*kernel.stats.cache_hits, *kernel.stats.cache_misses} == set(kernel.overloads)


def files_of(kernel: object) -> list[Path]:
    files = kernel.files  # type: ignore[attr-defined]
    return sorted(Path(files.cache_path).glob(f"{files._name}.*.nbc"))


def paths_from(checkout: Path) -> str:
    """Return the `PYTHONPATH` for the package of a checkout, and these tests."""
    return os.pathsep.join(map(str, (checkout, TESTS)))


def environment(home: Path | str, **others: str) -> dict[str, str]:
    given = {"PYTHONPATH": paths_from(TESTS.parent), "HF_HYBRID_CACHE_HOME": str(home), "NUMBA_CACHE_DIR": ""}
    return os.environ | given | others


def run_small(home: Path | str, program: str = CALL_SMALL, **others: str) -> tuple[str, str]:
    """Call the smallest kernel in a new process; return its standard output and error."""
    run = [sys.executable, "-P", "-W", "always", "-c", program]
    done = subprocess.run(run, env=environment(home, **others), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


ANOTHER = "assert another() == 2\n"
AT_ONCE = "from hf_hybrid_cache.kernels.vector import kernel_files; kernel_files._SECONDS_IN_SILENCE = 0.0\n"
FILL_THE_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A home in which a process has compiled both kernels, with permissions for all, and what that process said."""
    home, umask = tmp_path_factory.mktemp("compiled") / "home", os.umask(0)
    try:
        answer, said = run_small(home, AT_ONCE + CALL_SMALL + ANOTHER)
    finally:
        os.umask(umask)
    assert answer == COMPILED
    return home, said


@pytest.fixture
def home(compiled: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of that home."""
    return shutil.copytree(compiled[0], tmp_path / "home")


def test_the_first_process_compiles_and_says_so_and_others_find_it(compiled: tuple[Path, str], home: Path):
    assert compiled[1].splitlines() == [
        "compiling kernels, once on this machine: all of a quantized cache take up to some minutes"
    ]
    assert run_small(home, FILL_THE_DISK + AT_ONCE + CALL_SMALL + ANOTHER) == (LOADED, "")


def test_a_file_that_is_damaged_is_compiled_and_written_again(home: Path):
    for suffix in ("nbc", "nbi"):
        (damaged,) = home.rglob(f"{SMALL}[.-]*{suffix}")
        damaged.write_bytes(damaged.read_bytes()[:-20])
        assert run_small(home) == (COMPILED, "")
    assert run_small(home) == (LOADED, "")


@pytest.mark.parametrize("place", ["is a file", "is nowhere", "is on a full disk"])
def test_where_nothing_can_be_written_kernels_answer_and_that_is_said_once(place: str, tmp_path: Path):
    (tmp_path / "file").touch()
    home, start, others = {
        "is a file": (tmp_path / "file" / "folder", "", {}),
        "is nowhere": ("", "", {"XDG_CACHE_HOME": "", "HOME": "~"}),
        "is on a full disk": (tmp_path, FILL_THE_DISK, {}),
    }[place]
    answer, said = run_small(home, start + CALL_SMALL + ANOTHER, **others)
    assert answer == COMPILED
    assert said.count("Compiled kernels are not kept") == 1
    assert "Set HF_HYBRID_CACHE_HOME to a folder that can be written." in said


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs permissions of POSIX")
def test_kernels_that_others_could_write_are_not_used_with_one_warning(tmp_path: Path):
    home = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert run_small("/nowhere", **home) == (COMPILED, "")
    assert [path.suffix for path in sorted(tmp_path.rglob("*.nb*"))] == [".nbc", ".nbi"]
    (index,) = tmp_path.rglob("*.nbi")
    index.parent.chmod(0o777)
    before = [path.read_bytes() for path in sorted(index.parent.iterdir())]
    answer, said = run_small("/nowhere", CALL_SMALL + ANOTHER, **home)
    assert answer == COMPILED
    assert said.count("are not used, because") == said.count("Warning") == 1
    assert f"others can write to {index.parent}: each process compiles them again" in said
    assert "or set NUMBA_CACHE_DIR to one that only you can write to." in said
    assert [path.read_bytes() for path in sorted(index.parent.iterdir())] == before


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs permissions of POSIX")
def test_folders_are_for_their_owner_alone_and_old_ones_are_deleted(home: Path):
    folders = [home, *(path for path in home.rglob("*") if path.is_dir())]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700] * 3
    old, young = (home / "kernels" / name for name in ("old", "young"))
    folders[-1].rename(old)  # as if the sources had changed
    young.mkdir()
    os.utime(old, (0, time.time() - 31 * 24 * 3600))
    assert run_small(home) == (COMPILED, "")
    assert not old.exists()
    assert young.exists()


def test_two_processes_that_need_a_kernel_at_once_compile_it_once(home: Path):
    (folder,) = {path.parent for path in home.rglob("*.nbc")}
    for path in folder.glob("*.nb*"):
        path.unlink()
    run = [sys.executable, "-c", "import hf_hybrid_cache.kernels; print('ready', flush=True)\n" + CALL_SMALL]
    with FileLock(folder / f"{SMALL}.lock"):
        options = {"env": environment(home), "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(run, **options) for _ in range(2)]
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    assert sorted(process.communicate(timeout=300)[0].strip() for process in processes) == [LOADED, COMPILED]


def test_kernel_files_when_any_source_changes_then_are_compiled_again(home: Path, tmp_path: Path):
    copy = tmp_path / "copy" / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert run_small(home, PYTHONPATH=paths_from(copy.parent)) == (LOADED, "")
    with (copy / "kernels" / "vector" / "tiles.py").open("a") as source:
        source.write("# changed\n")
    assert run_small(home, PYTHONPATH=paths_from(copy.parent)) == (COMPILED, "")


WITHOUT_COMPILER = """
import numpy as np
from hf_hybrid_cache.kernels import PackedLayout, compile_in_background, quantize_blocks
from hf_hybrid_cache.kernels.vector.compiled import KernelsDisabledError
compile_in_background(np.dtype(np.float32))
try:
    quantize_blocks(np.zeros((1, 1, 64, 64), np.float32), PackedLayout.of_keys(8, 64, 64, is_rotated=True))
except KernelsDisabledError as error:
    print(error)
"""


def test_where_numba_may_not_compile_one_sentence_says_so(tmp_path: Path):
    said, errors = run_small(tmp_path, WITHOUT_COMPILER, NUMBA_DISABLE_JIT="1")
    assert said.endswith("NUMBA_DISABLE_JIT forbids Numba to compile: unset it.")
    assert len(said.splitlines()) == 1
    assert "Traceback" not in errors


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the instruction is one of x86-64")
def test_inline_assembly_when_kernel_comes_from_file_then_compiles():
    run_program("""
import hf_hybrid_cache.kernels
from llvmlite import binding
binding.initialize_native_target()
binding.initialize_native_asmprinter()
module = binding.parse_assembly('define void @f() { call void asm sideeffect "nop", ""() ret void }')
machine = binding.Target.from_default_triple().create_target_machine()
binding.create_mcjit_compiler(module, machine).finalize_object()
""")


# --- addresses of arrays: Numba frees an array after its last use, though its address may still be in use


MAKERS = {"empty", "zeros", "ones", "full", "arange", "array", "empty_like", "zeros_like"}


def compiled_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted((PACKAGE / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(each).startswith("jit") for each in node.decorator_list
            ):
                yield f"{path.stem}.{node.name}", node


FUNCTIONS = {name: node for name, node in compiled_functions() if ".ctypes.data" in ast.unparse(node)}


def assigned(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """The names that a function assigns to, each with what it gets."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            is_tuple = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if is_tuple else [(target, value)]
            yield from ((each.id, given) for each, given in pairs if isinstance(each, ast.Name))


def freed_too_early(function: ast.FunctionDef) -> set[str]:
    """The arrays that a compiled function makes and does not mention after the last use of their address."""
    names, found = list(assigned(function)), set()
    loops = [node for node in ast.walk(function) if isinstance(node, (ast.For, ast.While))]
    mentions = [(node.id, node.lineno) for node in ast.walk(function) if isinstance(node, ast.Name)]
    made = {
        name: value.lineno
        for name, value in names
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in MAKERS
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Attribute) or not ast.unparse(node).endswith(".ctypes.data"):
            continue
        array = ast.unparse(node).partition(".")[0].partition("[")[0]
        within = [loop.lineno for loop in loops if loop.lineno <= node.lineno <= (loop.end_lineno or 0)]
        if array not in made or any(made[array] < line for line in within):  # the next round of a loop may use it
            continue
        holders = {name for name, value in names if node in ast.walk(value) and not isinstance(value, ast.Call)}
        last_use = max([node.lineno, *(line for name, line in mentions if name in holders)])
        if max(line for name, line in mentions if name == array) <= last_use:
            found.add(array)
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_array_whose_address_a_kernel_uses_then_is_used_after_it(name: str):
    assert not freed_too_early(FUNCTIONS[name])
