"""Kernels are compiled once for each element type, are kept where that can be, and are never in the way."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

import hf_hybrid_cache
from hf_hybrid_cache.kernels import (
    PanelLayout,
    Products,
    dequantize_blocks,
    factor_of,
    multiply_many,
    quantize_blocks,
)
from hf_hybrid_cache.kernels.attention.attention import attention_kernels
from hf_hybrid_cache.kernels.attention.codes import quantized_attention_kernels
from hf_hybrid_cache.kernels.attention.prefill_attention import prefill_kernels
from hf_hybrid_cache.kernels.forms.blocks import coding_kernels
from hf_hybrid_cache.kernels.forms.panels import dequantize_panels, panel_kernels, quantize_panels
from hf_hybrid_cache.kernels.vector.compiled import Needed
from hf_hybrid_cache.kernels.weights.experts import expert_kernels
from hf_hybrid_cache.kernels.weights.gemm import gemm_kernels
from hf_hybrid_cache.kernels.weights.products import product_kernels
from kernels import calls, test_experts, test_products
from kernels.reference import stored
from kernels.test_quantization import layout_of

from common.programs import TESTS

NAMES = {"float32": "float32", "bfloat16": "uint16", "float16": "int16"}
SMALL = "kernels.small_kernels.small"
CALL_SMALL = """
from kernels.small_kernels import another, small
assert small() == 1
print(sum(small.stats.cache_misses.values()), sum(small.stats.cache_hits.values()))
"""
COMPILED, LOADED = "1 0", "0 1"


def attend(storage: str) -> None:
    calls.run(*calls.make(storage, 100))


def attend_quantized(storage: str) -> None:
    made = calls.make(storage, 70, first=1, coded=3)
    calls.attend_in(calls.workspace_of(made[0]), *made)


def attend_many(storage: str) -> None:
    calls.attend_to_prompt(*calls.make(storage, 100, length=70))


def code(storage: str) -> None:
    states, _ = stored(np.ones((1, 1, 64, 64), np.float32), storage)
    layout = layout_of(True, 4, 64)
    dequantize_blocks(quantize_blocks(states, layout), layout, states)


def quantize_loaded(storage: str) -> None:
    weight, _ = stored(np.ones((16, 32), np.float32), storage)
    layout = PanelLayout(4, 16, 32, 32)
    panels = np.empty(layout.num_bytes, np.uint8)
    quantize_panels(weight, layout, factor_of(1.0), panels)
    dequantize_panels(panels, layout, factor_of(1.0), weight)


def multiply_few(storage: str) -> None:
    layout = PanelLayout(4, 16, 32, 32)
    panels, out = np.zeros(layout.num_bytes, np.uint8), np.empty((1, 16), np.float32)
    tokens, chosen = np.ones((1, 32), np.float32), np.zeros(1, np.int64)
    products = Products.of_panels(panels.ctypes.data, layout, [1.0])
    products.multiply(0, tokens.ctypes.data, 1, False, 0, out.ctypes.data)
    products.multiply(0, tokens.ctypes.data, 1, False, 0, out.ctypes.data, chosen.ctypes.data)
    tokens, _ = stored(np.ones((1, 32), np.float32), storage)
    for kind in ("rows", "columns"):
        weights = test_products.weights(kind, 16, 32, storage)
        test_products.run(weights.products, tokens, 16, chosen=np.zeros((1, 1)))


def multiply_many_tokens(storage: str) -> None:
    layout = PanelLayout(4, 16, 32, 32)
    tokens, out = (stored(np.ones(shape, np.float32), storage)[0] for shape in ((1, 32), (1, 16)))
    panels, is_bfloat16 = np.zeros(layout.num_bytes, np.uint8), storage == "bfloat16"
    products = Products.of_panels(panels.ctypes.data, layout, [1.0])
    multiply_many(products, 0, tokens.ctypes.data, 1, is_bfloat16, 0, out.ctypes.data)


def add_up_experts(storage: str) -> None:
    for kind in ("4", "rows"):
        test_experts.run(test_experts.experts(kind, 32, 16, storage), test_experts.given(32, 16, storage=storage))


Ahead = Callable[[np.dtype], list[Needed]]
FAMILIES: dict[str, tuple[Ahead, Callable[[str], None], list[str]]] = {
    "attention": (attention_kernels, attend, list(NAMES)),
    "attention to codes": (lambda _: quantized_attention_kernels(), attend_quantized, list(NAMES)),
    "attention of many queries": (prefill_kernels, attend_many, list(NAMES)),
    "codes": (lambda _: coding_kernels(), code, ["float32", "bfloat16"]),
    "quantized weights": (lambda _: panel_kernels(), quantize_loaded, ["float32", "bfloat16"]),
    "products with weights": (lambda _: product_kernels(), multiply_few, ["float32", "bfloat16"]),
    "many products with quantized weights": (lambda _: gemm_kernels(), multiply_many_tokens, ["float32", "bfloat16"]),
    "experts": (lambda _: expert_kernels(), add_up_experts, ["float32", "bfloat16"]),
}
CASES = [(name, storage) for name, (_, _, storages) in FAMILIES.items() for storage in storages]


@pytest.mark.parametrize(("family", "storage"), CASES, ids=[" of ".join(case) for case in CASES])
def test_compiling_ahead_and_a_call_leave_one_overload_and_one_file(family: str, storage: str):
    ahead, call, _ = FAMILIES[family]
    needed = ahead(np.dtype(NAMES[storage]))
    for kernel, types in needed:
        kernel.compile(types)
    before = [(types in kernel.overloads, len(kernel.overloads), files_of(kernel)) for kernel, types in needed]
    call(storage)
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


def run_small(home: Path | str, program: str = CALL_SMALL, **environment: str) -> tuple[str, str]:
    """Call the smallest kernel in a new process; return its standard output and error."""
    given = {
        "PYTHONPATH": paths_from(TESTS.parent),
        "HF_HYBRID_CACHE_HOME": str(home),
        "NUMBA_CACHE_DIR": "",
    } | environment
    run = [sys.executable, "-P", "-W", "always", "-c", program]
    done = subprocess.run(run, env=os.environ | given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_second_process_finds_what_the_first_has_compiled(tmp_path: Path):
    assert run_small(tmp_path) == (COMPILED, "")
    assert run_small(tmp_path) == (LOADED, "")
    assert run_small("/nowhere", NUMBA_CACHE_DIR=str(tmp_path / "numba")) == (COMPILED, "")
    assert run_small("/nowhere", NUMBA_CACHE_DIR=str(tmp_path / "numba")) == (LOADED, "")


def test_a_file_that_is_damaged_is_compiled_and_written_again(tmp_path: Path):
    run_small(tmp_path)
    for damaged in [*tmp_path.rglob("*.nbc"), *tmp_path.rglob("*.nbi")]:
        damaged.write_bytes(damaged.read_bytes()[:-20])
        assert run_small(tmp_path) == (COMPILED, "")
        assert run_small(tmp_path) == (LOADED, "")


@pytest.mark.parametrize("home", ["is a file", "is nowhere"])
def test_where_nothing_can_be_written_kernels_answer_and_that_is_said_once(home: str, tmp_path: Path):
    (tmp_path / "file").touch()
    if home == "is a file":
        answer, said = run_small(tmp_path / "file" / "folder", CALL_SMALL + ANOTHER)
    else:
        answer, said = run_small("", CALL_SMALL + ANOTHER, XDG_CACHE_HOME="", HOME="~")
    assert answer == COMPILED
    assert said.count("Compiled kernels are not kept") == 1
    assert "Set HF_HYBRID_CACHE_HOME to a folder that can be written." in said


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs permissions of POSIX")
def test_kernels_that_others_could_write_are_not_used_with_one_warning(tmp_path: Path):
    home = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert run_small("/nowhere", **home) == (COMPILED, "")
    (open_to_others,) = (path.parent for path in tmp_path.rglob("*.nbi"))
    open_to_others.chmod(0o777)
    before = contents(tmp_path)
    answer, said = run_small("/nowhere", CALL_SMALL + ANOTHER, **home)
    assert answer == COMPILED
    assert said.count("are not used, because") == said.count("Warning") == 1
    assert f"others can write to {open_to_others}: each process compiles them again" in said
    assert "or set NUMBA_CACHE_DIR to one that only you can write to." in said
    assert contents(tmp_path) == before


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs permissions of POSIX")
def test_folders_of_kernels_when_made_then_are_for_their_owner_alone(tmp_path: Path):
    umask = os.umask(0)
    try:
        run_small(tmp_path / "deep" / "home")
    finally:
        os.umask(umask)
    folders = [path for path in (tmp_path / "deep" / "home").rglob("*") if path.is_dir()]
    assert len(folders) == 2
    assert {path.stat().st_mode & 0o777 for path in [tmp_path / "deep" / "home", *folders]} == {0o700}


ANOTHER = "assert another() == 2\n"
AT_ONCE = "from hf_hybrid_cache.kernels.vector import kernel_files; kernel_files._SECONDS_IN_SILENCE = 0.0\n"


def test_process_when_kernels_are_compiled_then_says_so_once_and_not_later(tmp_path: Path):
    answer, said = run_small(tmp_path, AT_ONCE + CALL_SMALL + ANOTHER)
    assert answer == COMPILED
    assert said.splitlines() == [
        "compiling kernels, once on this machine: all of a quantized cache take up to some minutes"
    ]
    assert run_small(tmp_path, AT_ONCE + CALL_SMALL + ANOTHER) == (LOADED, "")


FILL_THE_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="lets every write fail by a limit on files")
def test_on_a_full_disk_kernels_answer_and_what_is_there_is_used(tmp_path: Path):
    answer, said = run_small(tmp_path, FILL_THE_DISK + CALL_SMALL)
    assert answer == COMPILED
    assert said.count("Compiled kernels are not kept") == 1
    run_small(tmp_path)
    assert run_small(tmp_path, FILL_THE_DISK + CALL_SMALL) == (LOADED, "")


def test_two_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path: Path):
    place = "from hf_hybrid_cache.kernels.vector.kernel_files import kernel_folder; print(kernel_folder())"
    folder = Path(run_small(tmp_path, place)[0])
    given = {"PYTHONPATH": paths_from(TESTS.parent), "HF_HYBRID_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    program = "import hf_hybrid_cache.kernels; print('ready', flush=True)\n" + CALL_SMALL
    with FileLock(folder / f"{SMALL}.lock"):
        run = [sys.executable, "-c", program]
        processes = [subprocess.Popen(run, env=os.environ | given, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
    assert sorted(process.communicate(timeout=300)[0].strip() for process in processes) == [LOADED, COMPILED]


def test_kernel_files_when_any_source_changes_then_are_compiled_again(tmp_path: Path):
    package = Path(hf_hybrid_cache.__file__).parent
    copy = tmp_path / "copy" / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert run_small(tmp_path) == (COMPILED, "")
    assert run_small(tmp_path, PYTHONPATH=paths_from(copy.parent)) == (LOADED, "")
    with (copy / "kernels" / "vector" / "tiles.py").open("a") as source:
        source.write("# changed\n")
    assert run_small(tmp_path, PYTHONPATH=paths_from(copy.parent)) == (COMPILED, "")


def test_folders_of_sources_that_are_gone_are_deleted_after_a_month(tmp_path: Path):
    old, young = (tmp_path / "kernels" / name for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
    month_ago = old.stat().st_mtime - 31 * 24 * 3600
    os.utime(old, (month_ago, month_ago))
    run_small(tmp_path)
    assert not old.exists()
    assert young.exists()


WITHOUT_COMPILER = """
import numpy as np
from hf_hybrid_cache import *
from hf_hybrid_cache.kernels import PackedLayout, compile_in_background, quantize_blocks
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
